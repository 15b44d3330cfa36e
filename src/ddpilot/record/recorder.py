# SPDX-License-Identifier: Apache-2.0
"""Around everything that recording does in a rank: whatever goes wrong in here, training goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ddpilot.record import layout
from ddpilot.record.describe import Describer, Usual
from ddpilot.record.forks import ForkGuard
from ddpilot.record.operations import Operation
from ddpilot.record.pending import PendingWorks
from ddpilot.record.ring import RingWriter

Ticket = tuple[int, Usual, Any]
"""The index of a record, what it has in common with others, and its reduce-op as torch boxes it, or None."""


class Recorder:
    """What a source (kernels or hooks) tells of every collective, written into `ring`.

    `tell` shows one line.

    Of the errors in here the first one is told and kept in the ring, the others are counted there. None is raised.
    """

    def __init__(
        self, ring: RingWriter, describer: Describer, pending: PendingWorks, *, tell: Callable[[str], None]
    ) -> None:
        self._ring = ring
        self._describer = describer
        self._pending = pending
        self._tell = tell
        self._told = False
        self._forks = ForkGuard()

    def begin(self, operation: Operation, args: Sequence[Any]) -> Ticket | None:
        """`operation` is about to start with `args`. To be called by the function that torch calls for it."""
        if self._forks.is_fork():  # a forked process, such as a DataLoader's worker, has the ring mapped too
            return None
        try:
            return self._describer.begin(operation, args, sys._getframe(2))
        except Exception as error:  # noqa: BLE001 - said once, and never in the way of training
            self._fault(error)
            return None

    def started(self, ticket: Ticket | None, result: Any, work_at: int | None) -> None:
        """The collective of `ticket` has given `result`, with its work at `work_at`, as in `Operation`."""
        if ticket is None:
            return
        try:
            index, usual, reduce_op = ticket
            if work_at is None:
                self._ring.finish(index, time.monotonic_ns(), layout.DONE)
                return
            boxed = result if work_at < 0 else result[work_at]
            if boxed is not None:  # as for each collective of several that are coalesced
                self._pending.add(index, boxed, reduce_op, usual.at_any_time, usual.num_bytes)
        except Exception as error:  # noqa: BLE001 - said once, and never in the way of training
            self._fault(error)

    def failed(self, ticket: Ticket | None) -> None:
        """The collective of `ticket` raised instead of starting."""
        if ticket is None:
            return
        try:
            self._ring.finish(ticket[0], time.monotonic_ns(), layout.FAILED)
        except Exception as error:  # noqa: BLE001 - said once, and never in the way of training
            self._fault(error)

    def tick(self) -> None:
        """What the recording's own thread does from time to time: show that it lives, and catch up."""
        try:
            self._ring.beat(time.monotonic_ns())
            self._pending.ask_all()
        except Exception as error:  # noqa: BLE001 - said once, and never in the way of training
            self._fault(error)

    def close(self) -> None:
        """Catch up once more, let go of every work and close the ring. In a forked process: nothing."""
        if not self._forks.is_fork():
            self.tick()
            self._pending.clear()
            self._ring.close(time.monotonic_ns())

    def _fault(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        # Where even this fails, there is nobody left to tell.
        with suppress(Exception):
            self._ring.note_fault(text)
        with suppress(Exception):
            if not self._told:
                self._told = True
                self._tell(f"a collective could not be recorded ({text}); training goes on, this is said once")
