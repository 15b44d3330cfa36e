# SPDX-License-Identifier: Apache-2.0
"""Detect the end of collectives by polling torch's `Work` objects.

Polling replaces a callback on the work's future, which costs 10 to 100 us per collective, blocks gloo's threads while
they wait for the GIL, and can end an exiting process with `std::terminate`. A thread of the recording polls many works
at a time: directly after a collective, with cold caches, a poll costs several times as much.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.writer import RingWriter

MANY_WORKS, MANY_BYTES = 2048, 4 << 20
"""Above this many unfinished works, or bytes of tensors that they keep alive, a starting collective polls up to
`NUM_POLLED` of the oldest works, stopping at the first unfinished one."""
MAX_WORKS, MAX_BYTES = 4096, 64 << 20
"""Above these limits, only the newest collective of each group is followed."""
MAX_WAITING = 64
"""For up to this many waiting threads, the thread's newest collective is found without a lock."""
NUM_POLLED = 4
TURN_NS, NUM_POLLED_IN_TURN = 1_000_000, 64
"""Interval and number of polls for works that only threads which start collectives may query: polled in a batch, each
takes half of the time that it takes alone between two collectives."""
MANY_REDUCE_OPS, REDUCE_OP_STEP = 256, 17
"""If one polling interval has more new reduce-ops than this, only every 17th is kept, also in the next interval:
reading them takes longer than everything else, and keeping them evicts other data from the caches. A prime number, as
otherwise the ones kept could all come from one line."""


@dataclass(eq=False, slots=True, kw_only=True)
class RecordTemplate:
    """Properties that identical collectives share."""

    packed: bytes
    """Part of the record, packed as `layout.USUAL`."""
    num_bytes: int
    group: int
    """Number of the process group; -1 for point-to-point operations, which do not run in the group's order."""
    at_any_time: bool
    """True if any thread may poll the work at any time."""
    may_be_captured: bool
    """True if it may become part of a device graph, such as a CUDA graph."""
    reports_failure: bool
    """True if the work reports whether the collective failed."""
    may_be_waited_for: bool
    """True if a wait for the finished work only raises the error of a failure: its tensors are on the CPU, and the
    backend is gloo or the caller waits too."""
    is_waited_for: bool
    """True if the caller returns when the collective is over: it is not asynchronous and its tensors are on the CPU."""
    runs_on_stream: bool = False
    """True if a collective without a work runs on the device's current stream at the time of the call."""
    is_by_reducer: bool = False
    """True if DDP's reducer starts these collectives, always with the same reduce-op."""
    reduce_op: int | None = None
    """The reduce-op of the reducer, once it has been read: reading takes longer than polling the work."""


class StreamMark:
    """A point in a device's stream, polled instead of a work for a collective on that stream that returns no work."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        """True if the stream has passed this point."""
        return bool(self._event.query())


Ticket = tuple[int, RecordTemplate, int, Any]
"""Index of the record, properties shared with identical collectives, thread id, and the boxed reduce-op or None."""
_Entry = tuple[int, Any, RecordTemplate]
"""Index of the record, boxed work, and properties shared with identical collectives."""


class UnfinishedWorks:
    """Collectives of this process that are not known to have finished.

    `unbox` converts what is added to a `Work`, or to None if the backend returned none. `mark_stream` marks the current
    stream, unless calls are being coalesced. `is_capturing` returns True if this thread captures a device graph. A work
    is released as soon as it is seen finished, since it holds tensors (also DDP's buckets after their model is deleted)
    and its group's connections. If too many works are unfinished, only the newest of each group is followed: backends
    that may not be polled at any time run a group's collectives in order, so the ones before it are finished when it
    is.
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
        self._lock = threading.RLock()  # reentrant: a signal handler may start a collective in the middle of this
        self._any_time: deque[_Entry] = deque()
        self._starters: deque[_Entry] = deque()  # polled by threads that start collectives
        # By group, and by whether works may be polled at any time: a group has one backend per device type.
        self._newest_of: dict[tuple[int, bool], _Entry] = {}  # used if there are too many works to follow all
        self._passed_over: dict[int, deque[int]] = {}  # by group, records that are not followed
        self._reduce_ops: deque[tuple[int, Any, RecordTemplate]] = deque(maxlen=MAX_WORKS)
        self._reduce_op_step = 1
        # Collectives that their callers wait for, by record. No lock is needed: finishing one twice does no harm.
        self._waited_for: dict[int, _Entry] = {}
        self._newest: dict[int, int] = {}  # by thread
        self._added_bytes = self._removed_bytes = self._next_turn_ns = 0

    def add(self, ticket: Ticket, boxed: Any) -> None:
        """Follow the work `boxed` of the collective of `ticket` until it is finished.

        Works that may not be polled at any time are polled only by threads that start collectives, and never while such
        a thread captures a device graph, which a poll would invalidate.
        """
        index, usual, thread, reduce_op = ticket
        waited_for = self._waited_for
        if waited_for and (before := waited_for.get(self._newest.get(thread, 0))):
            self._end_waited_for(before)
        if reduce_op is not None and not index % self._reduce_op_step:
            self._reduce_ops.append((index, reduce_op, usual))
            if len(self._reduce_ops) > MANY_REDUCE_OPS:
                self._reduce_op_step = REDUCE_OP_STEP
        if usual.is_waited_for and len(waited_for) < MAX_WAITING:
            self._newest[thread] = index
            waited_for[index] = (index, boxed, usual)
        else:
            self._follow((index, boxed, usual))

    def _pollable(self, entry: _Entry) -> _Entry | None:
        # NCCL returns no work for coalesced calls nor, since torch 2.8, for calls that are not asynchronous.
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
                pollable = self._pollable(entry)
                if pollable is None:
                    self._ring.finish(index, 0, layout.UNKNOWN)
                    return
                entry = pollable
            if not self._make_room(is_many, is_turn, is_capturing):
                self._follow_newest(entry, is_capturing)
                return
        self._added_bytes += usual.num_bytes
        works.append(entry)

    def _follow_newest(self, entry: _Entry, is_capturing: bool) -> None:
        # Replaces the group's previous collective, which is passed over unless it has finished.
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

    def _poll_newest(self, *, at_any_time: bool) -> None:
        with self._lock:
            for key, entry in tuple(self._newest_of.items()):
                if entry[2].at_any_time == at_any_time and self._is_over(entry):
                    self._newest_of.pop(key, None)

    def _end_passed_over(self, group: int, index: int, now_ns: int) -> None:
        # Finish the records of `group` before `index`, which has finished: its backend runs collectives in order.
        with self._lock:
            passed_over = self._passed_over.get(group)
            while passed_over and passed_over[0] < index:
                self._ring.finish(passed_over.popleft(), now_ns, layout.DONE)
            if not passed_over:
                self._passed_over.pop(group, None)

    def _end_waited_for(self, entry: _Entry) -> None:
        # It is over when its thread starts the next one. Releasing it now, while it is in the caches, is much cheaper
        # than releasing it later, and the next one reuses its memory. It is polled only if the work reports failures.
        if not entry[2].reports_failure:
            self._ring.finish(entry[0], self._clock_ns(), layout.DONE)
        elif not self._is_over(entry):
            self._follow(entry)
        self._waited_for.pop(entry[0], None)  # not earlier: Ctrl-C may come between any two steps

    def _make_room(self, is_many: bool, is_turn: bool, is_capturing: bool) -> bool:
        # True if one more work may be followed.
        if is_turn and not is_capturing:
            self._next_turn_ns = self._clock_ns() + TURN_NS
            self._poll(self._starters, NUM_POLLED_IN_TURN, beyond_unfinished=False)
            if self._newest_of:
                self._poll_newest(at_any_time=False)
        if is_many:
            self._poll(self._any_time, NUM_POLLED, beyond_unfinished=False)
            if not is_capturing:
                self._poll(self._starters, NUM_POLLED, beyond_unfinished=False)
            num_works = len(self._any_time) + len(self._starters)
            return num_works < MAX_WORKS and self._added_bytes - self._removed_bytes <= MAX_BYTES
        return True

    def catch_up(self) -> None:
        """Read the reduce-ops, and poll all works that any thread may poll."""
        count = len(self._reduce_ops)
        self._reduce_op_step = REDUCE_OP_STEP if count * self._reduce_op_step > MANY_REDUCE_OPS else 1
        with suppress(AttributeError):  # torch 2.6 has no way to read it
            for _ in range(count):
                index, boxed, usual = self._reduce_ops.popleft()
                number = boxed.op() if usual.reduce_op is None else usual.reduce_op
                if usual.is_by_reducer:
                    usual.reduce_op = number
                self._ring.set_reduce_op(index, number)
        for index, entry in self._waited_for.copy().items():  # it changes meanwhile
            if entry[2].at_any_time and self._is_over(entry):
                self._waited_for.pop(index, None)
        count = len(self._any_time)
        for number in range(0, count, NUM_POLLED_IN_TURN):
            self._poll(self._any_time, min(NUM_POLLED_IN_TURN, count - number), beyond_unfinished=True)
        if self._newest_of:
            self._poll_newest(at_any_time=True)

    def clear(self) -> None:
        """Release all works."""
        with self._lock:
            self._any_time.clear()
            self._starters.clear()
            self._waited_for.clear()
            self._newest_of.clear()
            self._passed_over.clear()
            self._reduce_ops.clear()

    def _poll(self, works: deque[_Entry], num_works: int, *, beyond_unfinished: bool) -> None:
        # `beyond_unfinished`: also poll the works after an unfinished one, which are probably unfinished too.
        with self._lock:
            for _ in range(num_works):
                if not works:
                    break
                entry = works[0]
                if self._is_over(entry):
                    if works and works[0] is entry:  # not if a signal handler has removed it
                        self._removed_bytes += works.popleft()[2].num_bytes
                elif beyond_unfinished:
                    works.rotate(-1)
                else:
                    break
        if not (self._any_time or self._starters):
            self._removed_bytes = self._added_bytes  # several threads that add works may have lost count

    def _is_over(self, entry: _Entry) -> bool:
        index, boxed, usual = entry
        now_ns = self._clock_ns()
        try:
            work = boxed if isinstance(boxed, StreamMark) else self._unbox(boxed)
            if not work.is_completed():
                self._ring.still_pending(index, now_ns)
                return False
            outcome = layout.FAILED if usual.reports_failure and _has_failed(work, usual) else layout.DONE
        except Exception:
            self._forget(entry)  # a work that raises is not polled again
            self._ring.finish(index, 0, layout.UNKNOWN)
            raise
        self._ring.finish(index, now_ns, outcome)
        if usual.group in self._passed_over and not usual.at_any_time:
            self._end_passed_over(usual.group, index, now_ns)
        return True

    def _forget(self, entry: _Entry) -> None:
        self._waited_for.pop(entry[0], None)
        for works in (self._any_time, self._starters):
            with suppress(ValueError):  # it is in at most one of them
                works.remove(entry)
        key = entry[2].group, entry[2].at_any_time
        if self._newest_of.get(key) is entry:
            self._newest_of.pop(key, None)


def _has_failed(work: Any, usual: RecordTemplate) -> bool:
    # For a finished work. `is_success` and `exception` print a deprecation warning.
    if usual.may_be_waited_for:  # a fifth of the cost of a future
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


class PollingThread:
    """A thread that calls `poll` every `interval_s`."""

    def __init__(self, poll: Callable[[], None], interval_s: float) -> None:
        self._poll = poll
        self._interval_s = interval_s
        # Held while the thread runs. An Event would wait in Python code, with a new lock each time.
        self._running = threading.Lock()
        self._running.acquire()
        self._thread = threading.Thread(target=self._run, name="ddpilot-record", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it, for at most 1 s."""
        with suppress(RuntimeError):  # already stopped
            self._running.release()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._running.acquire(timeout=self._interval_s):
            self._poll()
