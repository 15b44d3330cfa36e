# SPDX-License-Identifier: Apache-2.0
"""Wait for keys in a store without torch's log output."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


def came(store: Store, keys: Sequence[str], limit_s: float) -> bool:
    """True if all `keys` were in `store` within `limit_s` seconds; checks at least once.

    `Store.wait` is not used because its timeout prints C++ messages to stderr. The polling interval grows, so that
    thousands of ranks do not keep the store busy.
    """
    deadline = time.monotonic() + limit_s
    pause_s = _FIRST_PAUSE_S
    asked = list(keys)
    while not store.check(asked):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True
