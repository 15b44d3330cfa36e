# SPDX-License-Identifier: Apache-2.0
"""Time the collectives of DDP's reducer, from their start to their end, in some of the updates.

The flight recorder sees each of them start, but polls for their ends, which it sees up to 50 ms late. Here the end
comes from a callback of the work's future, which costs some 10 us. Every second update is timed, or fewer if updates
have many collectives: two callbacks in an update on average.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Work

from ddpilot.errors import RecordError
from ddpilot.guard.probe import Notes
from ddpilot.profiler.rank.device_clock import DeviceClock
from ddpilot.record.collectives.recorder import reducer_observers
from ddpilot.record.collectives.recording import Recording, start_recording

_NUM_TIMED = 2
"""Collectives of an update that are timed, on average over updates."""
_NUM_RECORDS, _PAGE_BYTES = 64, 64 * 1024


class BucketTimes:
    """Times buckets, between `install` and the call of the function that this returns.

    `ring`: the file for a flight ring of our own, if this process records none. `num_first`: updates that are not
    timed. `device`: the clock of a device that is used, None on the CPU. `take` returns what was timed.
    """

    def __init__(self, notes: Notes, ring: Path, num_first: int, device: DeviceClock | None = None) -> None:
        self._notes = notes
        self._ring = ring
        self._device = device
        self._num_to_skip = num_first
        self._num_started = 0
        self._done: list[tuple[int, int, int]] = []

    def install(self) -> Callable[[], None]:
        """Start observing; returns the function that stops it."""
        recording = self._record()
        observe = self._notes.safely(self._started)
        reducer_observers.append(observe)

        def stop() -> None:
            reducer_observers.remove(observe)
            recording.stop()

        return stop

    def _record(self) -> Recording:
        try:
            return start_recording(self._ring, rank=self._notes.rank, num_records=_NUM_RECORDS, page_bytes=_PAGE_BYTES)
        except RecordError:  # it records already
            return Recording()

    def end_update(self) -> None:
        """Call after each update: it decides whether the next one is timed."""
        if self._num_to_skip:
            self._num_to_skip -= 1
        elif self._num_started:
            self._num_to_skip, self._num_started = max(1, self._num_started // _NUM_TIMED - 1), 0

    def take(self) -> list[tuple[int, int, int]]:
        """Return begin, end and bytes of the collectives that have ended since the last call."""
        taken, self._done = self._done, []
        return taken

    def _started(self, begin_ns: int, num_bytes: int, boxed: Any) -> None:
        if self._num_to_skip:
            return
        work = Work.unbox(boxed)
        if work is not None:
            self._num_started += 1
            if self._device is not None:
                begin_ns = self._device.now_beside()
            work.get_future().add_done_callback(functools.partial(self._ended, begin_ns, num_bytes))

    def _ended(self, begin_ns: int, num_bytes: int, _: Any) -> None:
        end_ns = time.monotonic_ns() if self._device is None else self._device.now_beside()
        self._done.append((begin_ns, end_ns, num_bytes))
