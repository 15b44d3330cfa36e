# SPDX-License-Identifier: Apache-2.0
"""Find when a device reaches the points of a program at which the host queues work for it, without waiting for it.

At each point an event is recorded on the current stream. Its time is read once it is over, some updates later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ddpilot.profiler.spans_file import DEVICE_CLOCK_FACT
from ddpilot.record.accelerator import is_capturing

_Mark = tuple[int, Any, bool]
"""Time of the host, event, and whether it is on a stream besides that of the model."""


class DeviceClock:
    """A clock of the host, which after `start` also notes when the device reaches the points at which it is read.

    `write_fact`: called with a name and a value.
    """

    def __init__(self, write_fact: Callable[[str, Any], None]) -> None:
        self._write_fact = write_fact
        self._device: torch.device | None = None
        self._marks: list[_Mark] = []
        self._batches: deque[list[_Mark]] = deque()
        self._free: list[Any] = []
        self._base: Any = None
        self._base_ns = 0
        self._known: list[tuple[int, int, bool]] = []
        self._points: list[tuple[int, int]] = []

    def start(self, device: torch.device) -> None:
        """Follow the streams of `device`, unless one is followed already or it is not an accelerator.

        Waits for the device once, to compare its clock with the host's.
        """
        accelerator = torch.accelerator.current_accelerator()
        if self._device is None and accelerator is not None and device.type == accelerator.type and not is_capturing():
            self._device = device
            host_ns, self._base = self._compare()
            self._points.append((host_ns, 0))

    def now(self) -> int:
        """Return the host's time in ns, and note when the current stream reaches this point."""
        return self._mark(is_beside=False)

    def now_beside(self) -> int:
        """Do the same on the stream of a collective."""
        return self._mark(is_beside=True)

    def _mark(self, *, is_beside: bool) -> int:
        now_ns = time.monotonic_ns()
        if self._device is not None and not is_capturing():
            event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
            event.record()
            self._marks.append((now_ns, event, is_beside))
        return now_ns

    def end_update(self) -> None:
        """Call after each update: reads the events of the updates that the device has finished."""
        if self._device is None or is_capturing():
            return
        self._batches.append(self._marks)
        self._marks = []
        while self._batches and all(event.query() for _, event, _ in reversed(self._batches[0])):
            self._read(self._batches.popleft())

    def take(self) -> list[tuple[int, int, bool]]:
        """Return the host's and the device's time of points that were read since the last call."""
        taken, self._known = self._known, []
        return taken

    def finish(self) -> None:
        """Wait for the device, read all events, and write how its clock compares with the host's."""
        if self._device is None:
            return
        with suppress(RuntimeError):  # the device has failed: what was read before is kept
            host_ns, event = self._compare()
            self.end_update()
            self._points.append((host_ns, self._read_ns(event)))
        self._write_fact(DEVICE_CLOCK_FACT, {"type": self._device.type, "points": self._points})
        self._device = None

    def _read(self, batch: list[_Mark]) -> None:
        """Read events, of which the latest becomes the one that the next ones are compared with: floats are short."""
        latest_ns, latest = self._base_ns, self._base
        for host_ns, event, is_beside in batch:
            device_ns = self._read_ns(event)
            self._known.append((host_ns, device_ns, is_beside))
            if device_ns > latest_ns and not is_beside:
                latest_ns, latest = device_ns, event
        self._free += [event for _, event, _ in batch if event is not latest]
        if latest is not self._base:
            self._free.append(self._base)
            self._base_ns, self._base = latest_ns, latest

    def _read_ns(self, event: Any) -> int:
        return self._base_ns + int(1e6 * self._base.elapsed_time(event))

    def _compare(self) -> tuple[int, Any]:
        """Return an event, and the time of the host at which an idle device reached it."""
        torch.accelerator.synchronize(self._device)
        event = torch.Event(self._device, enable_timing=True)
        begin_ns = time.monotonic_ns()
        event.record()
        event.synchronize()
        return (begin_ns + time.monotonic_ns()) // 2, event
