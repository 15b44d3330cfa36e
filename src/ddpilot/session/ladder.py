# SPDX-License-Identifier: Apache-2.0
"""What is done about ranks that are still busy after a failure or a stop: one step after another, each harder."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from ddpilot.findings.words import render_ranks
from ddpilot.session.outcome import Outcome
from ddpilot.session.ranks import Ranks
from ddpilot.session.report import FREE, Report

_FREE_AFTER_STOP_S = 0.5
_AGAIN_AFTER_STOP_S = 1.2
_FREE_AFTER_FAILURE_S = 0.1
_INTERRUPT_AFTER_FAILURE_S = 0.8
_AGAIN_AFTER_FAILURE_S = 1.6
_KILL_SILENT_AFTER_S = 2.0
_KILL_AFTER_S = 2.5
_FREE_LIMIT_S = 3.0
_FREE_GRACE_S = 1.0
"""How long ranks have to come back after they were freed, however often the stop button is pressed."""


class Ladder:
    """Interrupts, frees and at last kills the ranks of `outcome` that are busy. Every step is noted."""

    def __init__(self, ranks: Ranks, outcome: Outcome) -> None:
        self._ranks = ranks
        self._outcome = outcome
        self._steps: list[tuple[float, Callable[[], None]]] = []
        self._free_ids: dict[str, int] = {}
        self._freed_s = 0.0
        self._killed: set[int] = set()
        self._is_settled = False
        """Whether the group was freed, or found to need no freeing."""

    @property
    def due_s(self) -> float | None:
        """When the next step is taken; None where there is none."""
        return self._steps[0][0] if self._steps else None

    @property
    def is_done(self) -> bool:
        """Whether all is said of the group, and every rank that was freed has answered or is not waited for."""
        return self._is_settled and not (self._free_ids and time.monotonic() < self._freed_s + _FREE_LIMIT_S)

    def begin_after_stop(self, now: float) -> None:
        """The person wants the cell to end."""
        self._steps = [
            (now, self._interrupt),
            (now + _FREE_AFTER_STOP_S, self._free_stuck),
            (now + _AGAIN_AFTER_STOP_S, self._interrupt),
            (now + _KILL_SILENT_AFTER_S, self._kill_silent),
            (now + _KILL_AFTER_S, self._kill),
        ]

    def begin_after_failure(self, now: float) -> None:
        """A rank failed, and the cell is over for all."""
        self._steps = [
            (now + _FREE_AFTER_FAILURE_S, self._free),
            (now + _INTERRUPT_AFTER_FAILURE_S, self._interrupt_others),
            (now + _AGAIN_AFTER_FAILURE_S, self._interrupt),
            (now + _KILL_SILENT_AFTER_S, self._kill_silent),
            (now + _KILL_AFTER_S, self._kill),
        ]

    def hurry(self, now: float) -> None:
        """Take the next step now, and those after it in their time; killing waits for what freeing does."""
        if self._steps:
            due_s, step = self._steps[0]
            is_kill = step in (self._kill_silent, self._kill)
            early_s = due_s - (max(now, self._freed_s + _FREE_GRACE_S) if is_kill else now)
            self._steps = [(due_s - max(0.0, early_s), step) for due_s, step in self._steps]

    def climb(self, now: float) -> None:
        """Take the steps that are due; where no rank is busy any more, settle what becomes of the group."""
        while self._steps and self._steps[0][0] <= now:
            _, step = self._steps.pop(0)
            step()
        if not self._is_settled and not self._outcome.busy:
            self._steps.clear()
            if self._is_group_untouched():
                self._is_settled = self._outcome.spared_group = True
            else:
                self._free()  # a rank that was cut short has left its peers' collectives half done

    def take_answer(self, message_id: str, report: Report | None) -> None:
        """A rank has answered on the control channel."""
        if report is not None and message_id in self._free_ids:
            self._outcome.freed[self._free_ids.pop(message_id)] = report

    def forget(self, rank: int) -> None:
        """The rank has died, and answers no more."""
        self._free_ids = {sent: other for sent, other in self._free_ids.items() if other != rank}

    def interrupt_late(self, rank: int) -> None:
        """Interrupt a rank that has begun only now, when it is over for all."""
        self._signal((rank,), signal.SIGINT)

    def _is_group_untouched(self) -> bool:
        """A rank that is in none may have been on its way in: the store then counts it as one that has come."""
        reports = [part.report for part in self._outcome.parts.values()]
        return not self._ranks.standing.dead and all(
            report is not None and report.has_group and report.num_collectives == 0 and not report.in_backward
            for report in reports
        )

    def _free(self) -> None:
        host = self._ranks.host
        live = [rank for rank in range(host.world_size) if host.is_live(rank)]
        about = {"generation": self._ranks.generation}
        sent = {self._ranks.hub.send(rank, "control", FREE, about): rank for rank in live}
        self._free_ids = {message_id: rank for message_id, rank in sent.items() if message_id}
        self._freed_s = time.monotonic()
        self._is_settled = True

    def _free_stuck(self) -> None:
        busy = self._outcome.busy
        if busy:
            self._ranks.view.note(f"{render_ranks(busy)} did not stop; freeing the process group under them")
            self._free()

    def _interrupt(self) -> None:
        self._signal(self._outcome.interruptible, signal.SIGINT)

    def _interrupt_others(self) -> None:
        busy = self._outcome.busy
        if busy:
            self._ranks.view.note(f"interrupting {render_ranks(busy)}, still busy with the cell that failed")
            self._interrupt()

    def _kill_silent(self) -> None:
        """Kill those of which no thread has answered since: C code holds the interpreter lock there."""
        silent = set(self._free_ids.values())
        self._kill_ranks([rank for rank in self._outcome.busy if rank in silent])

    def _kill(self) -> None:
        self._kill_ranks(self._outcome.busy)

    def _kill_ranks(self, ranks: Sequence[int]) -> None:
        ranks = [rank for rank in ranks if rank not in self._killed]
        self._killed.update(ranks)
        if ranks:
            self._ranks.view.note(
                f"killing {render_ranks(ranks)}, which nothing else stops; the variables there are lost"
            )
            self._ranks.standing.note_kill(ranks)
            self._signal(ranks, signal.SIGKILL)

    def _signal(self, ranks: Sequence[int], number: int) -> None:
        if ranks:
            self._ranks.hub.post(lambda: self._ranks.host.signal(ranks, number))
