# SPDX-License-Identifier: Apache-2.0
"""Notice when collectives are over, by asking torch's `Work` objects from time to time.

Asking, not a callback on the work's future: that costs 10 to 100 us per collective, holds up gloo's threads while they
wait for Python's lock, and can end a process that exits meanwhile with `std::terminate`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ddpilot.record import layout
from ddpilot.record.ring import RingWriter

MAX_WORKS = 4096
"""Beyond this many unfinished collectives the oldest are asked no longer."""
MAX_BYTES = 64 << 20
"""The same for what their tensors may take in all, which a work keeps from being freed."""
MANY_WORKS, MANY_BYTES = 256, 4 << 20
"""Beyond these, a collective that starts asks some of those before it: that costs it some microseconds."""
NUM_ASKED = 4

_Entry = tuple[int, Any, Any, bool, int]
"""Index of the record, boxed work, boxed reduce-op if not written yet, whether it may be asked at any time, bytes."""


class PendingWorks:
    """The collectives of this process that were not over when last asked, oldest first.

    `unbox` makes a `Work` of what is added; `is_capturing` says whether this thread captures a CUDA graph. A work is
    let go as soon as it is seen over, since it holds tensors and its group's connections.
    """

    def __init__(self, ring: RingWriter, *, unbox: Callable[[Any], Any], is_capturing: Callable[[], bool]) -> None:
        self._ring = ring
        self._unbox = unbox
        self._is_capturing = is_capturing
        self._lock = threading.Lock()
        self._entries: deque[_Entry] = deque()
        self._num_bytes = 0

    def add(self, index: int, boxed: Any, reduce_op: Any, at_any_time: bool, num_bytes: int) -> None:
        """Ask from now on whether the work in `boxed`, the collective of record `index`, is over.

        `reduce_op`: a boxed one, or None; it is read when the work is asked, since that takes torch as long as all the
        rest of recording takes. Not `at_any_time`: ask only in threads that start collectives, and never while one of
        them captures a CUDA graph, which asking would spoil.
        """
        if at_any_time or not self._is_capturing():
            self._entries.append((index, boxed, reduce_op, at_any_time, num_bytes))
            self._num_bytes += num_bytes
            if self._num_bytes > MANY_BYTES or len(self._entries) > MANY_WORKS or not at_any_time:
                self._ask(NUM_ASKED, starts_collectives=True)

    def ask_all(self) -> None:
        """Ask all that may be asked by any thread."""
        self._ask(len(self._entries), starts_collectives=False)

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def _ask(self, num_works: int, *, starts_collectives: bool) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is at it
        try:
            self._ask_locked(min(num_works, len(self._entries)), starts_collectives)
            while self._entries and (len(self._entries) > MAX_WORKS or self._num_bytes > MAX_BYTES):
                self._num_bytes -= self._entries.popleft()[-1]
        finally:
            self._lock.release()

    def _ask_locked(self, num_works: int, starts_collectives: bool) -> None:
        kept: list[_Entry] = []
        try:
            for _ in range(num_works):
                index, boxed, reduce_op, at_any_time, num_bytes = self._entries.popleft()
                self._num_bytes -= num_bytes
                if hasattr(reduce_op, "op"):  # torch 2.6 has no way to read a boxed one
                    self._ring.set_reduce_op(index, reduce_op.op())
                may_ask = at_any_time or (starts_collectives and not self._is_capturing())
                if not may_ask or not self._is_over(index, boxed, check=not starts_collectives):
                    kept.insert(0, (index, boxed, None, at_any_time, num_bytes))
        finally:
            self._entries.extendleft(kept)
            self._num_bytes += sum(entry[-1] for entry in kept)

    def _is_over(self, index: int, boxed: Any, *, check: bool) -> bool:
        work = self._unbox(boxed)
        if not work.is_completed():
            self._ring.still_pending(index, time.monotonic_ns())
            return False
        outcome = layout.FAILED if check and _has_failed(work) else layout.DONE
        self._ring.finish(index, time.monotonic_ns(), outcome)
        return True


def _has_failed(work: Any) -> bool:
    # `is_success` and `exception` print a warning that they are deprecated.
    try:
        future = work.get_future()
    except RuntimeError:  # point-to-point works have none
        return False
    try:
        future.value()
    except Exception:  # noqa: BLE001 - whatever the backend raises
        return bool(future.done())
    return False


class Asker:
    """A thread that calls `ask` every `interval_s`."""

    def __init__(self, ask: Callable[[], None], interval_s: float) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpilot-record", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for it, at most a second."""
        self._stopped.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._ask()
