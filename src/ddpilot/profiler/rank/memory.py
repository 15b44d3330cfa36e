# SPDX-License-Identifier: Apache-2.0
"""Sample the memory of this rank, on the host and on its device, at most every few milliseconds."""

from __future__ import annotations

import os

import psutil
import torch

_INTERVAL_NS = 20_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemorySamples:
    """Samples that have not been written yet. One costs 10 us on Linux."""

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
