# SPDX-License-Identifier: Apache-2.0
"""Notice when collectives are over, by asking torch's `Work` objects from time to time.

Asking, not a callback on the work's future: that costs 10 to 100 us per collective, holds up gloo's threads while they
wait for Python's lock, and can end a process that exits meanwhile with `std::terminate`. Many at a time, in a thread of
the recording's own: right after a collective, with cold caches, the same takes a multiple.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ddpilot.record import layout
from ddpilot.record.ring import RingWriter

MANY_WORKS, MANY_BYTES = 2048, 4 << 20
"""Beyond so many unfinished collectives, or so much in their tensors, which a work keeps from being freed, one that
starts asks those before it, `NUM_ASKED` at most and none after one that is not over."""
MAX_WORKS, MAX_BYTES = 4096, 64 << 20
"""Beyond these, one that starts is not followed."""
NUM_ASKED = 4
MANY_REDUCE_OPS, REDUCE_OP_STEP = 256, 16
"""Of more new reduce-ops than that in one turn only every 16th is read, since that takes longer than all the rest."""

_Entry = tuple[int, Any, int, bool, bool]
"""Record, boxed work, bytes, whether any thread may ask at any time, whether torch says in a future if it failed (works
of point-to-point operations have none)."""


class PendingWorks:
    """The collectives of this process that are not known to be over.

    `unbox` makes a `Work` of what is added; `is_capturing` says whether this thread captures a CUDA graph. A work is
    let go as soon as it is seen over, since it holds tensors and its group's connections.
    """

    def __init__(self, ring: RingWriter, *, unbox: Callable[[Any], Any], is_capturing: Callable[[], bool]) -> None:
        self._ring = ring
        self._unbox = unbox
        self._is_capturing = is_capturing
        self._lock = threading.RLock()  # reentrant: a signal's handler may start a collective in the middle of this
        self._entries: deque[_Entry] = deque()
        self._reduce_ops: deque[tuple[int, Any]] = deque(maxlen=MAX_WORKS)
        self._added_bytes = self._removed_bytes = 0

    def add(self, entry: _Entry, reduce_op: Any) -> None:
        """Ask from now on whether the work in `entry` is over; `reduce_op` is a boxed one, or None.

        Those that may not be asked at any time are asked by threads that start collectives only, and never while one of
        them captures a CUDA graph, which asking would spoil.
        """
        if reduce_op is not None:
            self._reduce_ops.append((entry[0], reduce_op))
        num_bytes = self._added_bytes - self._removed_bytes
        if num_bytes > MANY_BYTES or len(self._entries) > MANY_WORKS or not entry[3]:
            if not entry[3] and self._is_capturing():
                self._ring.finish(entry[0], 0, layout.UNKNOWN)
                return
            self._ask(NUM_ASKED, only_at_any_time=False)
            if self._added_bytes - self._removed_bytes > MAX_BYTES or len(self._entries) >= MAX_WORKS:
                self._ring.finish(entry[0], 0, layout.UNKNOWN)
                return
        self._added_bytes += entry[2]
        self._entries.append(entry)

    def catch_up(self) -> None:
        """Read reduce-ops, and ask all works that any thread may ask."""
        count = len(self._reduce_ops)
        for number in range(count):
            record, boxed = self._reduce_ops.popleft()
            if count <= MANY_REDUCE_OPS or number % REDUCE_OP_STEP == 0:
                with suppress(AttributeError):  # torch 2.6 has no way to read it
                    self._ring.set_reduce_op(record, boxed.op())
        self._ask(len(self._entries), only_at_any_time=True)

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._entries.clear()
            self._reduce_ops.clear()

    def _ask(self, num_works: int, *, only_at_any_time: bool) -> None:
        for _ in range(num_works):
            with self._lock:  # taken anew for each, so that no collective has to wait for more than one
                if not self._entries:
                    self._removed_bytes = self._added_bytes  # several threads that add may have lost count
                    return
                entry = self._entries[0]
                if only_at_any_time > entry[3] or not self._is_over(entry):
                    self._entries.rotate(-1)
                    if not only_at_any_time:
                        return  # a collective is waiting to start, and most likely the next ones are not over either
                else:
                    self._entries.popleft()
                    self._removed_bytes += entry[2]

    def _is_over(self, entry: _Entry) -> bool:
        record, boxed, _, _, has_future = entry
        now_ns = time.monotonic_ns()
        try:
            work = self._unbox(boxed)
            if not work.is_completed():
                self._ring.still_pending(record, now_ns)
                return False
            outcome = layout.FAILED if has_future and _has_failed(work) else layout.DONE
        except Exception:
            self._entries.popleft()  # what cannot be asked is not asked again
            self._ring.finish(record, 0, layout.UNKNOWN)
            raise
        self._ring.finish(record, now_ns, outcome)
        return True


def _has_failed(work: Any) -> bool:
    # `is_success` and `exception` print a warning that they are deprecated.
    future = work.get_future()
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
