# SPDX-License-Identifier: Apache-2.0
"""Find the user's variables in an IPython namespace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def own_names(namespace: Mapping[str, Any]) -> list[str]:
    """Return the names in `namespace` except those that IPython itself sets, such as `open` and `Out`."""
    from IPython import get_ipython

    hidden = getattr(get_ipython(), "user_ns_hidden", {})
    return [name for name, value in namespace.items() if name not in hidden or hidden[name] is not value]
