# SPDX-License-Identifier: Apache-2.0
"""Wrap everything that recording does in a rank, so that an error in it never stops training."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ddpilot.record.collectives.operations import Operation
from ddpilot.record.collectives.record_builder import Describer
from ddpilot.record.collectives.unfinished_works import PendingWorks, Ticket
from ddpilot.record.entering import Entering
from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.writer import RingWriter
from ddpilot.record.forks import ForkGuard

Begin = Callable[[Sequence[Any]], Ticket | None]
Started = Callable[[Ticket | None, Any], None]


class OtherWorks(Protocol):
    """Unfinished collectives recorded by the compiled kernels."""

    def catch_up(self, now_ns: int, /) -> None:
        """Record which have finished."""

    def close(self) -> None:
        """Release them and the ring."""


def is_handling_error() -> bool:
    """True if the main thread is handling an exception: in an `except`, or leaving through a `finally`."""
    held: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    return (held[1] if isinstance(held, tuple) else held) is not None  # three values before Python 3.12


class Recorder:
    """Records every collective that the kernels report into `ring`.

    `tell` prints one line. `is_in_group`: True if this process has a default group now; `has_used_group`: True if it
    has ever used one; `find_entering`: returns the init_process_group call in progress; `others`: works of collectives
    recorded elsewhere. The first error in here is reported and kept in the ring, later ones are counted there. Errors
    are not raised, but KeyboardInterrupt is, as anywhere in Python.
    """

    def __init__(
        self,
        ring: RingWriter,
        describer: Describer,
        pending: PendingWorks,
        *,
        tell: Callable[[str], None],
        is_in_group: Callable[[], bool] = lambda: False,
        has_used_group: Callable[[], bool] = lambda: False,
        find_entering: Callable[[int], Entering | None] = lambda _: None,
        others: OtherWorks | None = None,
    ) -> None:
        self._ring = ring
        self._is_in_group, self._was_in_group = is_in_group, False
        self._has_used_group, self._has_been_in_group = has_used_group, False
        self._find_entering = find_entering
        self._entering: Entering | None = None
        self._describer = describer
        self._pending = pending
        self._others = others
        self._tell: Callable[[str], None] | None = tell
        self._forks = ForkGuard()
        self._start_ns = 0

    def begin_of(self, operation: Operation) -> Begin:
        """Return the function to call with the arguments of `operation` when torch is about to start it."""
        begin = self._describer.begin_of(operation)
        is_fork, clock_ns, frame_at = self._forks.is_fork, time.monotonic_ns, sys._getframe

        def begin_safely(args: Sequence[Any]) -> Ticket | None:
            if is_fork():  # a forked process, such as a DataLoader worker, has the ring mapped too
                return None
            self._start_ns = start_ns = clock_ns()
            try:
                # The caller's own frame always exists; it may have no caller, in a thread created by C++.
                return begin(args, frame_at(1).f_back, start_ns)
            except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
                self._fault(error)
                return None

        return begin_safely

    def started_of(self, operation: Operation) -> Started:
        """Return the function to call after `operation` has started, with its ticket and result."""
        at, add, finish = operation.work_at, self._pending.add, self._ring.finish

        def started(ticket: Ticket | None, result: Any) -> None:
            if ticket is None:
                return
            try:
                if at is None:
                    finish(ticket[0], time.monotonic_ns(), layout.DONE)
                    return
                boxed = result if at < 0 else result[at]
                if boxed is None:  # as for each of several coalesced calls
                    finish(ticket[0], 0, layout.UNKNOWN)
                    return
                add(ticket, boxed)
            except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
                self._fault(error)

        return started

    def cut_short(self, ticket: Ticket | None, error: BaseException) -> None:
        """Finish the record of `ticket`, whose collective raised `error` or was interrupted by Ctrl-C."""
        try:
            if ticket is not None:
                outcome = layout.FAILED if isinstance(error, Exception) else layout.UNKNOWN
                self._ring.finish(ticket[0], time.monotonic_ns(), outcome)
            elif not self._forks.is_fork():  # the record may exist without its ticket
                self._ring.finish_started_at(self._start_ns, self._describer.thread_id(), layout.UNKNOWN)
        except Exception as fault:  # noqa: BLE001 - reported once, and must never stop training
            self._fault(fault)

    def tick(self) -> None:
        """Called periodically by the recording's own thread: write the heartbeat, and update works and groups."""
        try:
            now_ns = time.monotonic_ns()
            self._ring.beat(now_ns)
            self._pending.catch_up()
            if self._others is not None:
                self._others.catch_up(now_ns)
            self._note_group(now_ns)
            self._note_entering(None if self._was_in_group else self._find_entering(now_ns))
        except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
            self._fault(error)

    @property
    def is_outside(self) -> bool:
        """True if this process was in no group at the last tick."""
        return not self._was_in_group

    def _note_group(self, now_ns: int) -> None:
        if not self._has_been_in_group and self._has_used_group():
            # The group may have been created and destroyed between two ticks.
            self._has_been_in_group = self._was_in_group = True
        if self._is_in_group() != self._was_in_group and (not self._was_in_group or not is_handling_error()):
            self._has_been_in_group = True
            self._was_in_group = not self._was_in_group
            self._ring.leave(0 if self._was_in_group else now_ns)

    def _note_entering(self, entering: Entering | None) -> None:
        if entering != self._entering:
            self._entering = entering
            self._ring.enter(*(entering or (0,)))

    def leave(self) -> None:
        """Record that the program has ended without an error: it starts no more collectives."""
        try:
            self._ring.leave(time.monotonic_ns())
        except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
            self._fault(error)

    def close(self) -> None:
        """Update a last time, release every work and close the ring."""
        self.tick()
        self._tell = None  # a thread that is in a collective now will find the ring closed
        self._pending.clear()
        if self._others is not None:
            self._others.close()
        self._ring.close(time.monotonic_ns())

    def _fault(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        tell, self._tell = self._tell, None
        # If this fails too, there is no way left to report it.
        with suppress(Exception):
            self._ring.note_fault(text)
        with suppress(Exception):
            if tell is not None:
                tell(f"a collective could not be recorded ({text}); training continues, this is reported once")
