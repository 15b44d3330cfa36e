# SPDX-License-Identifier: Apache-2.0
"""Call a function on a rank with the source of the notebook's cells, so that its tracebacks show their lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpilot.output.cell_sources import install_sources


def call_with_sources(sources: dict[str, list[str]], fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Install `sources` for `linecache` on this rank and return `fn(*args, **kwargs)`."""
    install_sources(sources)
    return fn(*args, **kwargs)
