# SPDX-License-Identifier: Apache-2.0
"""Read how long threads of this process were ready to run and had no core. Linux only; elsewhere it is 0."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")


class CoreWaits:
    """Reads the main thread's wait for a core, and the longest of all threads, from the kernel's statistics."""

    def __init__(self) -> None:
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open(_TASKS / str(os.getpid()) / "schedstat", os.O_RDONLY)
        self._last_ns = self._read()
        self._begin: dict[str, int] = {}
        self._begin_ns = 0

    def take_ns(self) -> int:
        """Return how long the main thread has waited since the last call, in ns."""
        last_ns, self._last_ns = self._last_ns, self._read()
        return self._last_ns - last_ns

    def begin(self) -> None:
        """Call where the time that `longest_share` is about begins."""
        self._begin, self._begin_ns = _read_threads(), time.monotonic_ns()

    def longest_share(self) -> float:
        """Return the longest wait of a thread since `begin`, as a share of the time since then."""
        if not self._begin_ns:
            return 0.0
        waits = [now - self._begin.get(thread, 0) for thread, now in _read_threads().items()]
        return max(waits, default=0) / max(time.monotonic_ns() - self._begin_ns, 1)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self) -> int:
        return int(os.pread(self._file, 64, 0).split()[1]) if self._file >= 0 else 0


def _read_threads() -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):
        for thread in _TASKS.iterdir():
            with contextlib.suppress(OSError, IndexError):  # it has ended
                found[thread.name] = int((thread / "schedstat").read_text("ascii").split()[1])
    return found
