# SPDX-License-Identifier: Apache-2.0
"""The names in a namespace of IPython's that are the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def own_names(namespace: Mapping[str, Any]) -> list[str]:
    """Those of `namespace` that IPython has not put there, as it puts `open` and `Out`."""
    from IPython import get_ipython

    hidden = getattr(get_ipython(), "user_ns_hidden", {})
    return [name for name, value in namespace.items() if name not in hidden or hidden[name] is not value]
