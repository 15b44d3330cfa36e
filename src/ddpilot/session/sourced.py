# SPDX-License-Identifier: Apache-2.0
"""A call that takes the text of the notebook's cells along, so that tracebacks made on a rank show their lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpilot.launching.shipping.sources import install_sources


def call_with_sources(sources: dict[str, list[str]], fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What `fn(*args, **kwargs)` returns; runs on a rank."""
    install_sources(sources)
    return fn(*args, **kwargs)
