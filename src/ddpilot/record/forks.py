# SPDX-License-Identifier: Apache-2.0
"""Detect that the process is a fork, at less than the cost of `os.getpid`."""

from __future__ import annotations

import mmap
import os
import sys

_MADV_WIPEONFORK = 18  # Linux 4.14; not in the mmap module


class ForkGuard:
    """Remembers the process that created it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.mark = _make_mark()
        """A page that reads as zero in a forked process; None if the system does not support that."""

    def is_fork(self) -> bool:
        """True if this process was forked since, also by C code without Python's knowledge."""
        # A system call costs 2 us within a collective, reading memory almost nothing.
        if self.mark is not None:
            return not self.mark[0]
        return os.getpid() != self._pid


def _make_mark() -> mmap.mmap | None:
    if sys.platform != "linux":
        return None
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        page.madvise(_MADV_WIPEONFORK)
    except OSError:
        page.close()
        return None
    page[0] = 1
    return page
