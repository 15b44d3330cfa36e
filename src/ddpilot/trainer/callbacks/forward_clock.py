# SPDX-License-Identifier: Apache-2.0
"""Clocks for forward passes: of the host, and of an accelerator, which runs kernels asynchronously."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch

from ddpilot.group.accelerator import current_event, runs_behind
from ddpilot.record.capturing import is_capturing


class ForwardClock(Protocol):
    """Accumulates the time between `begin` and `end`."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def take_s(self) -> float:
        """Return the seconds accumulated since the last call."""


class HostClock:
    """Host time, for models on the CPU."""

    def __init__(self) -> None:
        self._begin_s: float | None = None
        self._total_s = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._begin_s = time.perf_counter()

    def end(self) -> None:
        """Stop the clock."""
        if self._begin_s is not None:
            self._total_s += time.perf_counter() - self._begin_s
            self._begin_s = None

    def take_s(self) -> float:
        """Return the seconds accumulated since the last call."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class DeviceClock:
    """Accelerator time, by events in its stream; only `take_s` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: torch.Event | None = None
        self._waiting: deque[tuple[torch.Event, torch.Event]] = deque()
        self._total_s = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._begin = self._record()

    def end(self) -> None:
        """Stop the clock."""
        if self._begin is not None:
            self._waiting.append((self._begin, self._record()))
            self._begin = None
        # Keeps the deque as short as the device's queue.
        while self._waiting and not is_capturing() and self._waiting[0][1].query():
            self._add()

    def take_s(self) -> float:
        """Return the seconds accumulated since the last call; waits for the device."""
        while self._waiting:
            self._waiting[0][1].synchronize()
            self._add()
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    def _record(self) -> torch.Event:
        return current_event(self._device, enable_timing=True)

    def _add(self) -> None:
        begin, end = self._waiting.popleft()
        self._total_s += begin.elapsed_time(end) / 1e3


def make_clock(device: torch.device) -> ForwardClock:
    """Return a clock for models on `device`."""
    return DeviceClock(device) if runs_behind(device) else HostClock()
