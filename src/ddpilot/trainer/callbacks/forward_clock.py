# SPDX-License-Identifier: Apache-2.0
"""Clocks for forward passes: the host's, and that of an accelerator, which computes later than the host calls it."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch

from ddpilot.record.capturing import is_capturing
from ddpilot.training.accelerator import current_event, runs_behind


class ForwardClock(Protocol):
    """Adds up the time between `begin` and `end`."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def take_s(self) -> float:
        """Seconds since it was asked last."""


class HostClock:
    """The time of the host, for models on the CPU."""

    def __init__(self) -> None:
        self._begin_s: float | None = None
        self._total_s = 0.0

    def begin(self) -> None:
        """Start."""
        self._begin_s = time.perf_counter()

    def end(self) -> None:
        """Stop."""
        if self._begin_s is not None:
            self._total_s += time.perf_counter() - self._begin_s
            self._begin_s = None

    def take_s(self) -> float:
        """Seconds since it was asked last."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class DeviceClock:
    """The time of an accelerator, by events in its stream; the host waits for it in `take_s` only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: torch.Event | None = None
        self._waiting: deque[tuple[torch.Event, torch.Event]] = deque()
        self._total_s = 0.0

    def begin(self) -> None:
        """Start."""
        self._begin = self._record()

    def end(self) -> None:
        """Stop."""
        if self._begin is not None:
            self._waiting.append((self._begin, self._record()))
            self._begin = None
        # The list stays as short as the device's queue.
        while self._waiting and not is_capturing() and self._waiting[0][1].query():
            self._add()

    def take_s(self) -> float:
        """Seconds since it was asked last."""
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
    """The clock of models on `device`."""
    return DeviceClock(device) if runs_behind(device) else HostClock()
