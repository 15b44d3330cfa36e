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
from typing import Any, NamedTuple

from ddpilot.record import layout
from ddpilot.record.ring import RingWriter

MANY_WORKS, MANY_BYTES = 2048, 4 << 20
"""Beyond so many unfinished collectives, or so much in their tensors, which a work keeps from being freed, one that
starts asks those before it, `NUM_ASKED` at most and none after one that is not over."""
MAX_WORKS, MAX_BYTES = 4096, 64 << 20
"""Beyond these, one that starts is not followed."""
NUM_ASKED = 4
TURN_NS, NUM_ASKED_IN_TURN = 1_000_000, 64
"""Works that only a thread which starts collectives may ask are asked so often, so many at a time: one after the other
takes half of what each takes alone, between two collectives."""
MANY_REDUCE_OPS, REDUCE_OP_STEP = 256, 16
"""Of more new reduce-ops than that in one turn only every 16th is read, since that takes longer than all the rest."""


class Usual(NamedTuple):
    """What collectives that are alike have in common."""

    packed: bytes
    """Part of the record, as `layout.USUAL`."""
    num_bytes: int
    at_any_time: bool
    """Any thread may ask at any time whether it is over."""
    tells_failure: bool
    """Its work has a future that says whether it failed."""


_Entry = tuple[int, Any, Usual]
"""Record and boxed work."""


class PendingWorks:
    """The collectives of this process that are not known to be over.

    `unbox` makes a `Work` of what is added; `is_capturing` says whether this thread captures a CUDA graph. A work is
    let go as soon as it is seen over, since it holds tensors and its group's connections.
    """

    def __init__(
        self,
        ring: RingWriter,
        *,
        unbox: Callable[[Any], Any],
        is_capturing: Callable[[], bool],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._ring = ring
        self._unbox = unbox
        self._clock_ns = clock_ns
        self._is_capturing = is_capturing
        self._lock = threading.RLock()  # reentrant: a signal's handler may start a collective in the middle of this
        self._any_time: deque[_Entry] = deque()
        self._starters: deque[_Entry] = deque()  # to be asked by threads that start collectives
        self._reduce_ops: deque[tuple[int, Any]] = deque(maxlen=MAX_WORKS)
        self._added_bytes = self._removed_bytes = self._next_turn_ns = 0

    def add(self, entry: _Entry, reduce_op: Any) -> None:
        """Ask from now on whether the work in `entry` is over; `reduce_op` is a boxed one, or None.

        Those that may not be asked at any time are asked by threads that start collectives only, and never while one of
        them captures a CUDA graph, which asking would spoil.
        """
        if reduce_op is not None:
            self._reduce_ops.append((entry[0], reduce_op))
        usual = entry[2]
        works = self._any_time if usual.at_any_time else self._starters
        is_many = len(works) > MANY_WORKS or self._added_bytes - self._removed_bytes > MANY_BYTES
        if (is_many or not usual.at_any_time) and not self._make_room(usual, is_many):
            self._ring.finish(entry[0], 0, layout.UNKNOWN)
            return
        self._added_bytes += usual.num_bytes
        works.append(entry)

    def _make_room(self, usual: Usual, is_many: bool) -> bool:
        # Whether one more may be followed.
        is_capturing = self._is_capturing()
        if is_capturing and not usual.at_any_time:
            return False
        if is_many:
            self._ask(self._any_time, NUM_ASKED, go_on=False)
            if not is_capturing:
                self._ask(self._starters, NUM_ASKED, go_on=False)
            num_works = len(self._any_time) + len(self._starters)
            return num_works < MAX_WORKS and self._added_bytes - self._removed_bytes <= MAX_BYTES
        if (now_ns := self._clock_ns()) > self._next_turn_ns:
            self._next_turn_ns = now_ns + TURN_NS
            self._ask(self._starters, NUM_ASKED_IN_TURN, go_on=False)
        return True

    def catch_up(self) -> None:
        """Read reduce-ops, and ask all works that any thread may ask."""
        count = len(self._reduce_ops)
        for number in range(count):
            record, boxed = self._reduce_ops.popleft()
            if count <= MANY_REDUCE_OPS or number % REDUCE_OP_STEP == 0:
                with suppress(AttributeError):  # torch 2.6 has no way to read it
                    self._ring.set_reduce_op(record, boxed.op())
        self._ask(self._any_time, len(self._any_time), go_on=True)

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._any_time.clear()
            self._starters.clear()
            self._reduce_ops.clear()

    def _ask(self, works: deque[_Entry], num_works: int, *, go_on: bool) -> None:
        # `go_on`: also after one that is not over, which the next ones are most likely not either.
        for _ in range(num_works):
            with self._lock:  # taken anew for each, so that no collective has to wait for more than one
                if not works:
                    break
                if self._is_over(works):
                    self._removed_bytes += works.popleft()[2].num_bytes
                elif go_on:
                    works.rotate(-1)
                else:
                    break
        if not (self._any_time or self._starters):
            self._removed_bytes = self._added_bytes  # several threads that add may have lost count

    def _is_over(self, works: deque[_Entry]) -> bool:
        record, boxed, usual = works[0]
        now_ns = self._clock_ns()
        try:
            work = self._unbox(boxed)
            if not work.is_completed():
                self._ring.still_pending(record, now_ns)
                return False
            outcome = layout.FAILED if usual.tells_failure and _has_failed(work) else layout.DONE
        except Exception:
            works.popleft()  # what cannot be asked is not asked again
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
