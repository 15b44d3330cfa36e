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
from dataclasses import dataclass
from typing import Any

from ddpilot.record import layout
from ddpilot.record.ring import RingWriter

MANY_WORKS, MANY_BYTES = 2048, 4 << 20
"""Beyond so many unfinished collectives, or so much in their tensors, which a work keeps from being freed, one that
starts asks those before it, `NUM_ASKED` at most and none after one that is not over."""
MAX_WORKS, MAX_BYTES = 4096, 64 << 20
"""Beyond these, only the newest collective of each group is followed."""
MAX_WAITING = 64
"""Of so many threads that wait for a collective the newest one is found without a lock."""
NUM_ASKED = 4
TURN_NS, NUM_ASKED_IN_TURN = 1_000_000, 64
"""Works that only a thread which starts collectives may ask are asked so often, so many at a time: one after the other
takes half of what each takes alone, between two collectives."""
MANY_REDUCE_OPS, REDUCE_OP_STEP = 256, 17
"""Of more new reduce-ops than that in one turn only every 17th is kept, and also in the next turn: to read them takes
longer than all the rest, and keeping them costs more than what else there is to do, by the caches that they fill.
A prime number, else it could be the same line's each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What collectives that are alike have in common."""

    packed: bytes
    """Part of the record, as `layout.USUAL`."""
    num_bytes: int
    group: int
    """Number of the process group; -1 for point-to-point, which is not run in the order of the group."""
    at_any_time: bool
    """Any thread may ask at any time whether it is over."""
    may_be_captured: bool
    """It may become a part of a device graph, such as a CUDA graph."""
    tells_failure: bool
    """Its work says whether it failed."""
    is_waited_for: bool
    """Its caller returns when it is over: it is not asynchronous, and its tensors are in the CPU's memory."""
    runs_on_stream: bool = False
    """If it gives no work, it runs on the stream of the device that is current when it is called."""


class StreamMark:
    """A point of a device's stream, in place of the work that a collective on that stream does not give."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        """True if the stream has passed this point."""
        return bool(self._event.query())


Ticket = tuple[int, Usual, int, Any]
"""The index of a record, what it has in common with others, its thread, and its boxed reduce-op, or None."""
_Entry = tuple[int, Any, Usual]
"""The index of a record, its boxed work, and what it has in common with others."""


class PendingWorks:
    """The collectives of this process that are not known to be over.

    `unbox` makes a `Work` of what is added, or None where the backend gave none; `mark_stream` marks the current
    stream, unless calls are coalesced; `is_capturing` says whether this thread captures a device graph. A work is
    let go as soon as it is seen over, since it holds tensors, also DDP's buckets after their model is deleted, and its
    group's connections. Where too many are not over, only the newest of each group is followed: backends that may not
    be asked at any time run the collectives of a group in their order, so that those before it are over when it is.
    """

    def __init__(
        self,
        ring: RingWriter,
        *,
        unbox: Callable[[Any], Any],
        is_capturing: Callable[[], bool],
        mark_stream: Callable[[], StreamMark | None] = lambda: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._ring = ring
        self._unbox = unbox
        self._clock_ns = clock_ns
        self._is_capturing = is_capturing
        self._mark_stream = mark_stream
        self._lock = threading.RLock()  # reentrant: a signal's handler may start a collective in the middle of this
        self._any_time: deque[_Entry] = deque()
        self._starters: deque[_Entry] = deque()  # to be asked by threads that start collectives
        # By group, and by whether they may be asked at any time, as a group has a backend for each type of device.
        self._newest_of: dict[tuple[int, bool], _Entry] = {}  # where there are too many to follow all
        self._passed_over: dict[int, deque[int]] = {}  # by group, records of those that are not followed
        self._reduce_ops: deque[tuple[int, Any]] = deque(maxlen=MAX_WORKS)
        self._reduce_op_step = 1
        # Those that their callers wait for, by record. Without a lock: to see one over twice does no harm.
        self._waited_for: dict[int, _Entry] = {}
        self._newest: dict[int, int] = {}  # by thread
        self._added_bytes = self._removed_bytes = self._next_turn_ns = 0

    def add(self, ticket: Ticket, boxed: Any) -> None:
        """Ask from now on whether the work `boxed` of the collective of `ticket` is over.

        Those that may not be asked at any time are asked by threads that start collectives only, and never while one of
        them captures a device graph, which asking would spoil.
        """
        index, usual, thread, reduce_op = ticket
        waited_for = self._waited_for
        if waited_for and (before := waited_for.get(self._newest.get(thread, 0))):
            self._end_waited_for(before)
        if reduce_op is not None and not index % self._reduce_op_step:
            self._reduce_ops.append((index, reduce_op))
            if len(self._reduce_ops) > MANY_REDUCE_OPS:
                self._reduce_op_step = REDUCE_OP_STEP
        if usual.is_waited_for and len(waited_for) < MAX_WAITING:
            self._newest[thread] = index
            waited_for[index] = (index, boxed, usual)
        else:
            self._follow((index, boxed, usual))

    def _with_something_to_ask(self, entry: _Entry) -> _Entry | None:
        # NCCL gives no work of calls that are coalesced nor, since torch 2.8, of a call that is not asynchronous.
        index, boxed, usual = entry
        if self._unbox(boxed) is not None:
            return entry
        mark = self._mark_stream() if usual.runs_on_stream else None
        return None if mark is None else (index, mark, usual)

    def _follow(self, entry: _Entry) -> None:
        index, _, usual = entry
        works = self._any_time if usual.at_any_time else self._starters
        is_many = len(works) > MANY_WORKS or self._added_bytes - self._removed_bytes > MANY_BYTES
        is_turn = not usual.at_any_time and self._clock_ns() > self._next_turn_ns
        if is_many or is_turn or usual.may_be_captured:
            is_capturing = self._is_capturing()
            if is_capturing and usual.may_be_captured:
                self._ring.finish(index, 0, layout.UNKNOWN)
                return
            if usual.may_be_captured:
                askable = self._with_something_to_ask(entry)
                if askable is None:
                    self._ring.finish(index, 0, layout.UNKNOWN)
                    return
                entry = askable
            if not self._make_room(is_many, is_turn, is_capturing):
                self._follow_newest(entry, is_capturing)
                return
        self._added_bytes += usual.num_bytes
        works.append(entry)

    def _follow_newest(self, entry: _Entry, is_capturing: bool) -> None:
        # In place of the one before it in its group, of which is kept whether it was over then.
        usual = entry[2]
        if usual.group < 0:
            self._pass_over(entry)
            return
        key = usual.group, usual.at_any_time
        with self._lock:
            before = self._newest_of.get(key)
            self._newest_of[key] = entry
        if before is not None and (is_capturing or not self._is_over(before)):
            self._pass_over(before)

    def _pass_over(self, entry: _Entry) -> None:
        index, _, usual = entry
        self._ring.still_pending(index, self._clock_ns())
        self._ring.finish(index, 0, layout.UNKNOWN)
        if usual.group >= 0 and not usual.at_any_time:
            self._passed_over.setdefault(usual.group, deque(maxlen=MAX_WORKS)).append(index)

    def _ask_newest(self, *, at_any_time: bool) -> None:
        with self._lock:
            for key, entry in tuple(self._newest_of.items()):
                if entry[2].at_any_time == at_any_time and self._is_over(entry):
                    self._newest_of.pop(key, None)

    def _end_passed_over(self, group: int, index: int, now_ns: int) -> None:
        # Those of `group` before the record `index`, which is over: its backend runs them in their order.
        with self._lock:
            passed_over = self._passed_over.get(group)
            while passed_over and passed_over[0] < index:
                self._ring.finish(passed_over.popleft(), now_ns, layout.DONE)
            if not passed_over:
                self._passed_over.pop(group, None)

    def _end_waited_for(self, entry: _Entry) -> None:
        # When its thread starts another one it is over. To let go of it now, while it is in the caches, takes a part of
        # what it takes later, and the next one finds its memory. It is asked only where that tells more.
        if not entry[2].tells_failure:
            self._ring.finish(entry[0], self._clock_ns(), layout.DONE)
        elif not self._is_over(entry):
            self._follow(entry)
        self._waited_for.pop(entry[0], None)  # not before: Ctrl-C may come between any two steps

    def _make_room(self, is_many: bool, is_turn: bool, is_capturing: bool) -> bool:
        # Whether one more may be followed.
        if is_turn and not is_capturing:
            self._next_turn_ns = self._clock_ns() + TURN_NS
            self._ask(self._starters, NUM_ASKED_IN_TURN, go_on=False)
            if self._newest_of:
                self._ask_newest(at_any_time=False)
        if is_many:
            self._ask(self._any_time, NUM_ASKED, go_on=False)
            if not is_capturing:
                self._ask(self._starters, NUM_ASKED, go_on=False)
            num_works = len(self._any_time) + len(self._starters)
            return num_works < MAX_WORKS and self._added_bytes - self._removed_bytes <= MAX_BYTES
        return True

    def catch_up(self) -> None:
        """Read reduce-ops, and ask all works that any thread may ask."""
        count = len(self._reduce_ops)
        self._reduce_op_step = REDUCE_OP_STEP if count * self._reduce_op_step > MANY_REDUCE_OPS else 1
        for _ in range(count):
            index, boxed = self._reduce_ops.popleft()
            with suppress(AttributeError):  # torch 2.6 has no way to read it
                self._ring.set_reduce_op(index, boxed.op())
        for index, entry in self._waited_for.copy().items():  # it changes meanwhile
            if entry[2].at_any_time and self._is_over(entry):
                self._waited_for.pop(index, None)
        count = len(self._any_time)
        for number in range(0, count, NUM_ASKED_IN_TURN):
            self._ask(self._any_time, min(NUM_ASKED_IN_TURN, count - number), go_on=True)
        if self._newest_of:
            self._ask_newest(at_any_time=True)

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._any_time.clear()
            self._starters.clear()
            self._waited_for.clear()
            self._newest_of.clear()
            self._passed_over.clear()
            self._reduce_ops.clear()

    def _ask(self, works: deque[_Entry], num_works: int, *, go_on: bool) -> None:
        # `go_on`: also after one that is not over, which the next ones are most likely not either.
        with self._lock:
            for _ in range(num_works):
                if not works:
                    break
                entry = works[0]
                if self._is_over(entry):
                    if works and works[0] is entry:  # not where a signal's handler was faster
                        self._removed_bytes += works.popleft()[2].num_bytes
                elif go_on:
                    works.rotate(-1)
                else:
                    break
        if not (self._any_time or self._starters):
            self._removed_bytes = self._added_bytes  # several threads that add may have lost count

    def _is_over(self, entry: _Entry) -> bool:
        index, boxed, usual = entry
        now_ns = self._clock_ns()
        try:
            work = boxed if isinstance(boxed, StreamMark) else self._unbox(boxed)
            if not work.is_completed():
                self._ring.still_pending(index, now_ns)
                return False
            outcome = layout.FAILED if usual.tells_failure and _has_failed(work, usual) else layout.DONE
        except Exception:
            self._forget(entry)  # what cannot be asked is not asked again
            self._ring.finish(index, 0, layout.UNKNOWN)
            raise
        self._ring.finish(index, now_ns, outcome)
        if usual.group in self._passed_over and not usual.at_any_time:
            self._end_passed_over(usual.group, index, now_ns)
        return True

    def _forget(self, entry: _Entry) -> None:
        self._waited_for.pop(entry[0], None)
        for works in (self._any_time, self._starters):
            with suppress(ValueError):  # it is in one of them at most
                works.remove(entry)
        key = entry[2].group, entry[2].at_any_time
        if self._newest_of.get(key) is entry:
            self._newest_of.pop(key, None)


def _has_failed(work: Any, usual: Usual) -> bool:
    # Of a work that is over. `is_success` and `exception` print a warning that they are deprecated.
    if usual.is_waited_for:  # takes a fifth of what a future takes, and its caller does the same
        try:
            work.wait()
        except Exception:  # noqa: BLE001 - whatever the backend raises
            return True
        return False
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
        # Held while it runs. An event would do, but waits in Python, with a new lock each time.
        self._running = threading.Lock()
        self._running.acquire()
        self._thread = threading.Thread(target=self._run, name="ddpilot-record", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for it, at most a second."""
        with suppress(RuntimeError):  # it was stopped before
            self._running.release()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._running.acquire(timeout=self._interval_s):
            self._ask()
