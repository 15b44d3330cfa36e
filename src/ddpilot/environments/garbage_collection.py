# SPDX-License-Identifier: Apache-2.0
"""`collector_paused`: a part of a program in which the garbage collector does not start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, unless it is disabled. An import creates no garbage, and torch's takes less time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
