# SPDX-License-Identifier: Apache-2.0
"""Check that forking this process is safe: the CUDA driver is not in use, and no thread beyond torch's own is running.

A fork after ``cuInit`` breaks CUDA in the child. A fork while another thread runs can leave a lock locked forever (an
OpenMP pool that has run one parallel region hangs the child's first one).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

_CUDA_ERROR_NOT_INITIALIZED = 3


class CleanWatch:
    """Detects which import started threads or initialized CUDA. `dirty`: a description of it, or None."""

    def __init__(self) -> None:
        self.dirty: str | None = None
        self._num_threads = 0

    def begin(self) -> None:
        """Record the current number of threads as the baseline, after importing torch."""
        self._num_threads = count_threads()

    def check(self, module: str) -> None:
        """Set `dirty` if importing `module`, the last import, made forking unsafe."""
        if self.dirty is None and cuda_driver_in_use():
            self.dirty = f"importing `{module}` initialised the CUDA driver"
        elif self.dirty is None and count_threads() > self._num_threads:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:]) or "not Python's"
            extra = count_threads() - self._num_threads
            self.dirty = f"importing `{module}` started {extra} thread{'s' * (extra > 1)} ({names})"


def count_threads() -> int:
    """Number of threads of this process, on Linux including those that Python did not start."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()


def cuda_driver_in_use() -> bool:
    """True if ``cuInit`` was called in this process; determined without calling it."""
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps") as maps:
        if "libcuda.so" not in maps.read():
            return False
    context = ctypes.c_void_p()
    driver = ctypes.CDLL("libcuda.so.1")
    return bool(driver.cuCtxGetCurrent(ctypes.byref(context)) != _CUDA_ERROR_NOT_INITIALIZED)
