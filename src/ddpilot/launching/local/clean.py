# SPDX-License-Identifier: Apache-2.0
"""Prove that forking this process is safe: no CUDA driver in use, no threads beyond those of torch's import.

A fork after ``cuInit`` breaks CUDA in the child; a fork beside a thread can leave a lock taken for ever (an OpenMP
pool after one parallel region hangs the child's first one).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

_CUDA_ERROR_NOT_INITIALIZED = 3


class CleanWatch:
    """Remembers the threads that torch's import made, and who made more of them. `dirty` is None or says what."""

    def __init__(self) -> None:
        self.dirty: str | None = None
        self._num_threads = 0

    def begin(self) -> None:
        """Take the state now as torch's own."""
        self._num_threads = count_threads()

    def check(self, module: str) -> None:
        """Blame `module`, which was just imported, for what is not clean any more."""
        if self.dirty is None and cuda_driver_in_use():
            self.dirty = f"importing `{module}` initialised the CUDA driver"
        elif self.dirty is None and count_threads() > self._num_threads:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:]) or "not Python's"
            extra = count_threads() - self._num_threads
            self.dirty = f"importing `{module}` started {extra} thread{'s' * (extra > 1)} ({names})"


def count_threads() -> int:
    """Threads of this process, also those that Python does not know."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()


def cuda_driver_in_use() -> bool:
    """Whether ``cuInit`` was called in this process, found without calling it."""
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps") as maps:
        if "libcuda.so" not in maps.read():
            return False
    context = ctypes.c_void_p()
    driver = ctypes.CDLL("libcuda.so.1")
    return bool(driver.cuCtxGetCurrent(ctypes.byref(context)) != _CUDA_ERROR_NOT_INITIALIZED)
