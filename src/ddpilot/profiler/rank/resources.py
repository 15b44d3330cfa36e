# SPDX-License-Identifier: Apache-2.0
"""Read what this rank uses of its machine: the time that threads wait for a core, and memory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil
import torch

_TASKS = Path("/proc/self/task")
_INTERVAL_NS = 20_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class CoreWaits:
    """Reads the main thread's wait for a core, and the longest of all threads, from the kernel's statistics.

    Linux only; elsewhere both are 0.
    """

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


class MemorySamples:
    """Samples of memory, on the host and the device, that have not been written yet. One costs 10 us on Linux."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, int, int]] = []
        self._next_ns = 0
        self._has_device = torch.cuda.is_available()

    def sample(self, now_ns: int) -> None:
        """Sample, unless the last sample was taken less than 20 ms ago."""
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + _INTERVAL_NS
            self._samples.append((now_ns, _resident_bytes(), self._allocated_bytes()))

    def take(self) -> list[tuple[int, int, int]]:
        """Return the samples, and keep none."""
        taken, self._samples = self._samples, []
        return taken

    def _allocated_bytes(self) -> int:
        if not self._has_device:
            return -1
        stats = torch.cuda.memory_stats_as_nested_dict()  # empty before the device is used
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except FileNotFoundError:  # not Linux
        return int(psutil.Process().memory_info().rss)
