# SPDX-License-Identifier: Apache-2.0
"""What is done about ranks that are still busy after a failure or a stop: one step after another, each harder."""

from __future__ import annotations

import bisect
import signal
import time
from collections.abc import Callable, Collection, Sequence

from ddpilot.findings.words import render_ranks
from ddpilot.session.collectives import count_begun, has_unfinished, is_in_group_code
from ddpilot.session.outcome import Outcome
from ddpilot.session.ranks import Ranks
from ddpilot.session.report import FREE, Report

_FREE_AFTER_STOP_S = 0.5
_AGAIN_AFTER_STOP_S = 1.2
_FREE_AFTER_FAILURE_S = 0.1
_LOOK_AGAIN_S = 0.05
_INTERRUPT_AFTER_FAILURE_S = 0.8
_FREE_STUCK_AFTER_FAILURE_S = 1.2
_AGAIN_AFTER_FAILURE_S = 1.6
_KILL_SILENT_AFTER_S = 2.0
_KILL_AFTER_S = 2.5
_FREE_LIMIT_S = 3.0
_FREE_GRACE_S = 1.0
"""How long ranks have to come back after they were freed, however often the stop button is pressed."""

_PATIENCE_S = 30.0
"""How long a rank that is in no collective may go on with what nothing interrupts, after another rank's failure."""

_LOOK_WHILE_PATIENT_S = 1.0


class Ladder:
    """Interrupts, frees and at last kills the ranks of `outcome` that are busy. Every step is noted.

    A rank that is in no collective is not freed from one, and is killed at the second press of the stop button only:
    it may be in a long operation of C++ code, which ends.
    """

    def __init__(self, ranks: Ranks, outcome: Outcome) -> None:
        self._ranks = ranks
        self._outcome = outcome
        self._steps: list[tuple[float, Callable[[float], None]]] = []
        self._free_ids: dict[str, int] = {}
        self._freed_s = 0.0
        self._killed: set[int] = set()
        self._num_presses = 0
        self._is_patient = False
        """Whether what is left is waited for."""
        self._patient_until_s = float("inf")
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
        self._num_presses = 1
        self._is_patient = False
        self._patient_until_s = float("inf")
        self._steps = [
            (now, self._interrupt),
            (now + _FREE_AFTER_STOP_S, self._free_stuck),
            (now + _AGAIN_AFTER_STOP_S, self._interrupt),
            (now + _KILL_SILENT_AFTER_S, self._kill_silent),
            (now + _KILL_AFTER_S, self._kill),
        ]

    def begin_after_failure(self, now: float) -> None:
        """A rank failed, and the cell is over for all."""
        self._patient_until_s = now + _PATIENCE_S
        self._steps = [
            (now + _FREE_AFTER_FAILURE_S, self._free_touched),
            (now + _INTERRUPT_AFTER_FAILURE_S, self._interrupt_others),
            (now + _FREE_STUCK_AFTER_FAILURE_S, self._free_in_group),
            (now + _AGAIN_AFTER_FAILURE_S, self._interrupt),
            (now + _KILL_SILENT_AFTER_S, self._kill_silent),
            (now + _KILL_AFTER_S, self._kill),
        ]

    def hurry(self, now: float) -> None:
        """Take the next step now, and those after it in their time; killing waits for what freeing does."""
        self._num_presses += 1
        if self._is_patient:
            self._kill(now)
        elif self._steps:
            due_s, step = self._steps[0]
            is_kill = step in (self._kill_silent, self._kill)
            early_s = due_s - (max(now, self._freed_s + _FREE_GRACE_S) if is_kill else now)
            self._steps = [(due_s - max(0.0, early_s), step) for due_s, step in self._steps]

    def climb(self, now: float) -> None:
        """Take the steps that are due; where no rank is busy any more, settle what becomes of the group."""
        while self._steps and self._steps[0][0] <= now:
            _, step = self._steps.pop(0)
            step(now)
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
        if self._ranks.standing.dead or any(report is None or not report.has_group for report in reports):
            return False
        known = [report for report in reports if report is not None]
        return (
            len({(report.num_groups, report.num_group_names) for report in known}) == 1
            and not any(report.in_backward for report in known)
            and (all(report.num_collectives == 0 for report in known) or self._have_failed_alike(known))
        )

    def _have_failed_alike(self, reports: Sequence[Report]) -> bool:
        """True if every rank raised the same in the same line after the same number of collectives.

        Not where one was interrupted or returned: it may have taken a step of the optimizer that another has not.
        """
        return (
            len(reports) == self._ranks.world_size
            and all(report.status == "error" and not report.is_victim and not report.interrupted for report in reports)
            and len({(report.type_name, report.message, report.traceback) for report in reports}) == 1
            and len({report.num_collectives for report in reports}) == 1
            and reports[0].num_collectives is not None
            and not any(has_unfinished(self._ranks.ring_folder, rank, p2p_only=True) for rank in self._outcome.parts)
        )

    def _is_touched(self) -> bool:
        """True if a rank has begun a collective in this cell, is in no group, or may be in either state."""
        if self._ranks.standing.dead:
            return True
        for part in self._outcome.parts.values():
            report = part.report
            if report is None:
                if part.has_begun and self._has_begun_one(part.rank):
                    return True
            elif not report.has_group or report.num_collectives != 0 or report.in_backward:
                return True
        return False

    def _in_group_code(self) -> set[int]:
        """The ranks at work that are in a collective, or in torch's or ddpilot's code for process groups."""
        at_work = self._outcome.at_work
        stacks = self._ranks.read_stacks(at_work) if at_work else {}
        return {rank for rank in at_work if is_in_group_code(stacks.get(rank, "")) or self._is_in_collective(rank)}

    def _is_in_collective(self, rank: int) -> bool:
        return self._has_begun_one(rank) and has_unfinished(self._ranks.ring_folder, rank)

    def _has_begun_one(self, rank: int) -> bool:
        """True if the rank has begun a collective in this cell, or if that is not known."""
        before = self._outcome.parts[rank].num_before
        return before is None or count_begun(self._ranks.ring_folder, rank) != before

    def _add(self, due_s: float, step: Callable[[float], None]) -> None:
        bisect.insort(self._steps, (due_s, step), key=lambda each: each[0])

    def _free(self) -> None:
        host = self._ranks.host
        live = [rank for rank in range(host.world_size) if host.is_live(rank)]
        # After a stop ranks were interrupted before, and may be at their own clean-up now.
        interrupted = () if self._num_presses else self._outcome.interruptible
        sent = {}
        for rank in live:
            about = {"generation": self._ranks.generation, "interrupt": rank in interrupted}
            sent[self._ranks.hub.send(rank, "control", FREE, about)] = rank
        self._free_ids = {message_id: rank for message_id, rank in sent.items() if message_id}
        self._freed_s = time.monotonic()
        self._is_settled = True

    def _free_touched(self, now: float) -> None:
        """Free all, once the group has to be rebuilt anyway; until then look again."""
        if self._is_settled or not self._outcome.busy:
            return
        if self._is_touched():
            self._free()
        else:
            self._add(now + _LOOK_AGAIN_S, self._free_touched)

    def _free_in_group(self, _now: float) -> None:
        """Free all where a rank waits for others without having begun a collective, as in `new_group`."""
        if not self._is_settled and self._outcome.at_work and self._in_group_code():
            self._free()

    def _free_stuck(self, now: float) -> None:
        at_work = self._outcome.at_work
        if at_work and (self._is_touched() or self._in_group_code()):
            them = "it" if len(at_work) == 1 else "them"
            self._ranks.view.note(f"{render_ranks(at_work)} did not stop; freeing the process group under {them}")
            self._free()
        elif at_work:
            self._add(now + _LOOK_WHILE_PATIENT_S, self._free_in_group)

    def _interrupt(self, _now: float) -> None:
        self._signal(self._outcome.interruptible, signal.SIGINT)

    def _interrupt_others(self, now: float) -> None:
        busy = self._outcome.busy
        if busy:
            self._ranks.view.note(f"interrupting {render_ranks(busy)}, still busy with the cell that failed")
            self._interrupt(now)

    def _kill_silent(self, _now: float) -> None:
        """Kill those of which no thread has answered since: C code holds the GIL there."""
        silent = set(self._free_ids.values())
        if self._num_presses > 1:
            self._kill_ranks([rank for rank in self._outcome.busy if rank in silent])

    def _kill(self, now: float) -> None:
        """Kill ranks that are stuck in a collective; the others where a person insists, else wait for them."""
        busy = self._outcome.busy
        if self._num_presses > 1 or now >= self._patient_until_s:
            self._kill_ranks(busy)
            return
        stuck = self._in_group_code()
        if stuck and not self._is_settled:
            self._free()
            self._add(now + _FREE_GRACE_S, self._kill)
            return
        self._kill_ranks([rank for rank in busy if rank in stuck])
        self._wait_for([rank for rank in busy if rank not in self._killed], now)

    def _wait_for(self, ranks: Sequence[int], now: float) -> None:
        if not ranks:
            return
        self._add(min(now + _LOOK_WHILE_PATIENT_S, self._patient_until_s), self._kill)
        if not self._is_patient and self._outcome.at_work:
            self._is_patient = True
            press = "press stop again" if self._num_presses else "press stop twice"
            lost = "its variables are" if len(ranks) == 1 else "their variables are"
            self._ranks.view.note(
                f"waiting for {render_ranks(ranks)}, in an operation that cannot be interrupted; {press} to kill "
                f"{'it' if len(ranks) == 1 else 'them'} ({lost} lost then)"
            )

    def _kill_ranks(self, ranks: Collection[int]) -> None:
        ranks = [rank for rank in ranks if rank not in self._killed]
        self._killed.update(ranks)
        if ranks:
            reasons = {reason for rank in ranks for reason in self._still_stuck(rank)}
            self._ranks.view.note(
                f"killing {render_ranks(ranks)}, which nothing else stops; the variables there are lost"
                + "".join(f" ({reason})" for reason in sorted(reasons))
            )
            self._ranks.standing.note_kill(ranks)
            self._signal(ranks, signal.SIGKILL)

    def _still_stuck(self, rank: int) -> list[str]:
        freed = self._outcome.freed.get(rank)
        return [] if freed is None or not freed.value else list(freed.value["still_stuck"])

    def _signal(self, ranks: Sequence[int], number: int) -> None:
        if ranks:
            self._ranks.hub.post(lambda: self._ranks.host.signal(ranks, number))
