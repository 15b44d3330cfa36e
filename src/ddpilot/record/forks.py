# SPDX-License-Identifier: Apache-2.0
"""Notice that this is a forked copy of the process, at less than the price of asking for the process's number."""

from __future__ import annotations

import mmap
import os
import sys

_MADV_WIPEONFORK = 18  # Linux 4.14; the mmap module has no name for it


class ForkGuard:
    """Remembers the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.mark = _make_mark()
        """A page that reads as zero in a forked process; None where the system has no such thing."""

    def is_fork(self) -> bool:
        """Whether this is another process, forked since; also by C code that Python knows nothing of."""
        # A system call costs 2 us within a collective, a look at memory next to nothing.
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
