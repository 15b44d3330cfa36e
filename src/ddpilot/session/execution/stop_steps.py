# SPDX-License-Identifier: Apache-2.0
"""Escalating steps for ranks that stay busy after a failure or an interrupt: interrupt, free the group, kill."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence

from ddpilot.findings.text import render_ranks
from ddpilot.launching.escalation import Escalation
from ddpilot.session.execution.collective_counts import (
    count_begun,
    find_count_mismatches,
    has_unfinished,
    is_in_group_code,
)
from ddpilot.session.execution.outcome import Outcome
from ddpilot.session.kernels.manager import Ranks
from ddpilot.session.protocol.report import FREE, Report

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
"""Seconds that ranks have to finish after they were freed, even if the user interrupts again."""

_PATIENCE_S = 30.0
"""Seconds that a rank outside any collective may continue an uninterruptible operation after another rank's failure."""

_LOOK_WHILE_PATIENT_S = 1.0


class StopSteps:
    """Interrupts, frees and finally kills the busy ranks of `outcome`. Every step is reported in the view.

    A rank that is not in a collective may be in a long C++ operation that will return: it is killed only after a second
    interrupt, or `_PATIENCE_S` after the failure of another rank.
    """

    def __init__(self, ranks: Ranks, outcome: Outcome) -> None:
        self._ranks = ranks
        self._outcome = outcome
        self._steps = Escalation()
        self._free_ids: dict[str, int] = {}
        self._freed_s = 0.0
        self._killed: set[int] = set()
        self._num_presses = 0
        self._is_patient = False
        """True while waiting for ranks that cannot be interrupted."""
        self._patient_until_s = float("inf")
        self._is_settled = False
        """True if the group was freed, or found to be intact."""

    @property
    def due_s(self) -> float | None:
        """Time of the next step (monotonic clock); None if there are no more."""
        return self._steps.due_s

    @property
    def is_done(self) -> bool:
        """True if the group is settled and every freed rank has replied or missed its time limit."""
        return self._is_settled and not (self._free_ids and time.monotonic() < self._freed_s + _FREE_LIMIT_S)

    def begin_after_stop(self, now: float) -> None:
        """Start the steps that follow an interrupt by the user."""
        self._num_presses = 1
        self._is_patient = False
        self._patient_until_s = float("inf")
        self._steps.start(
            (now, self._interrupt),
            (now + _FREE_AFTER_STOP_S, self._free_stuck),
            (now + _AGAIN_AFTER_STOP_S, self._interrupt),
            (now + _KILL_SILENT_AFTER_S, self._kill_silent),
            (now + _KILL_AFTER_S, self._kill),
        )

    def begin_after_failure(self, now: float) -> None:
        """Start the steps that follow the failure of a rank, which ends the cell on all ranks."""
        self._patient_until_s = now + _PATIENCE_S
        self._steps.start(
            (now + _FREE_AFTER_FAILURE_S, self._free_touched),
            (now + _INTERRUPT_AFTER_FAILURE_S, self._interrupt_others),
            (now + _FREE_STUCK_AFTER_FAILURE_S, self._free_in_group),
            (now + _AGAIN_AFTER_FAILURE_S, self._interrupt),
            (now + _KILL_SILENT_AFTER_S, self._kill_silent),
            (now + _KILL_AFTER_S, self._kill),
        )

    def hurry(self, now: float) -> None:
        """Take the next step now and move the later ones forward.

        Killing still waits until freeing had time to take effect.
        """
        self._num_presses += 1
        if self._is_patient:
            self._kill(now)
        elif self._steps.due_s is not None:
            is_kill = self._steps.next_step in (self._kill_silent, self._kill)
            earliest_s = max(now, self._freed_s + _FREE_GRACE_S) if is_kill else now
            self._steps.advance(max(0.0, self._steps.due_s - earliest_s))

    def climb(self, now: float) -> None:
        """Take the steps that are due. Once no rank is busy, decide whether the group is intact or has to be freed."""
        self._steps.run_due(now)
        if not self._is_settled and not self._outcome.busy:
            self._steps.clear()
            if self._is_group_untouched():
                self._is_settled = self._outcome.spared_group = True
            else:
                self._free()  # an interrupted rank leaves collectives of its peers unfinished

    def free_after_end(self) -> None:
        """Free the ranks after a cell that ended well but left its groups unusable."""
        self._free()

    def take_answer(self, message_id: str, report: Report | None) -> None:
        """Record the reply of a rank on the control channel."""
        if report is not None and message_id in self._free_ids:
            self._outcome.freed[self._free_ids.pop(message_id)] = report

    def forget(self, rank: int) -> None:
        """Expect no more replies from a rank that has died."""
        self._free_ids = {sent: other for sent, other in self._free_ids.items() if other != rank}

    def interrupt_late(self, rank: int) -> None:
        """Interrupt a rank that starts its part only now, after the cell has failed or was interrupted."""
        self._signal((rank,), signal.SIGINT)

    def _is_group_untouched(self) -> bool:
        """True if no rank has used the group in this cell, or all failed alike.

        False if ranks have begun different numbers of collectives in a group, also in earlier cells. False if a rank is
        outside the group: it may have begun to enter it, and the store already counts it as a member.
        """
        reports = [part.report for part in self._outcome.parts.values()]
        if self._ranks.standing.dead or any(report is None or not report.has_group for report in reports):
            return False
        known_by_rank = {rank: part.report for rank, part in self._outcome.parts.items() if part.report is not None}
        known = [*known_by_rank.values()]
        return (
            len({(report.num_groups, report.num_group_names) for report in known}) == 1
            and not any(report.in_backward for report in known)
            and not find_count_mismatches(known_by_rank)
            and (all(report.num_collectives == 0 for report in known) or self._have_failed_alike(known))
        )

    def _have_failed_alike(self, reports: Sequence[Report]) -> bool:
        """True if every rank raised the same exception at the same line after the same number of collectives.

        False if a rank was interrupted or returned: it may have taken an optimizer step that other ranks have not.
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
        """True if the group has to be rebuilt.

        That is so if a rank is dead or outside the group, has begun a collective, or failed in a backward pass.
        """
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
        """Return the busy ranks that are in a collective, or in process-group code of torch or ddpilot."""
        at_work = self._outcome.at_work
        stacks = self._ranks.read_stacks(at_work) if at_work else {}
        return {rank for rank in at_work if is_in_group_code(stacks.get(rank, "")) or self._is_in_collective(rank)}

    def _is_in_collective(self, rank: int) -> bool:
        return self._has_begun_one(rank) and has_unfinished(self._ranks.ring_folder, rank)

    def _has_begun_one(self, rank: int) -> bool:
        """True if the rank has begun a collective in this cell, or if that is unknown."""
        before = self._outcome.parts[rank].num_before
        return before is None or count_begun(self._ranks.ring_folder, rank) != before

    def _free(self) -> None:
        host = self._ranks.host
        live = [rank for rank in range(host.world_size) if host.is_live(rank)]
        # After an interrupt the ranks have already received SIGINT and may be in their own clean-up code.
        interrupted = () if self._num_presses else self._outcome.interruptible
        sent = {}
        for rank in live:
            about = {"generation": self._ranks.generation, "interrupt": rank in interrupted}
            sent[self._ranks.hub.send(rank, "control", FREE, about)] = rank
        self._free_ids = {message_id: rank for message_id, rank in sent.items() if message_id}
        self._freed_s = time.monotonic()
        self._is_settled = True

    def _free_touched(self, now: float) -> None:
        """Free all ranks once the group has to be rebuilt anyway; until then check again later."""
        if self._is_settled or not self._outcome.busy:
            return
        if self._is_touched():
            self._free()
        else:
            self._steps.add(now + _LOOK_AGAIN_S, self._free_touched)

    def _free_in_group(self, _now: float) -> None:
        """Free all ranks if one waits for others without having begun a collective, as in `new_group`."""
        if not self._is_settled and self._outcome.at_work and self._in_group_code():
            self._free()

    def _free_stuck(self, now: float) -> None:
        at_work = self._outcome.at_work
        if at_work and (self._is_touched() or self._in_group_code()):
            them = "it" if len(at_work) == 1 else "them"
            self._ranks.view.note(f"{render_ranks(at_work)} did not stop; freeing the process group under {them}")
            self._free()
        elif at_work:
            self._steps.add(now + _LOOK_WHILE_PATIENT_S, self._free_in_group)

    def _interrupt(self, _now: float) -> None:
        self._signal(self._outcome.interruptible, signal.SIGINT)

    def _interrupt_others(self, now: float) -> None:
        busy = self._outcome.busy
        if busy:
            self._ranks.view.note(f"interrupting {render_ranks(busy)}, still busy with the cell that failed")
            self._interrupt(now)

    def _kill_silent(self, _now: float) -> None:
        """After a second interrupt, kill ranks that did not reply to the request to free them.

        None of their threads runs, because C code holds the GIL.
        """
        silent = set(self._free_ids.values())
        if self._num_presses > 1:
            self._kill_ranks([rank for rank in self._outcome.busy if rank in silent])

    def _kill(self, now: float) -> None:
        """Kill the busy ranks that are stuck in a collective, freeing the group first, and wait for the others.

        All of them are killed after a second interrupt, or `_PATIENCE_S` after the failure of another rank.
        """
        busy = self._outcome.busy
        if self._num_presses > 1 or now >= self._patient_until_s:
            self._kill_ranks(busy)
            return
        stuck = self._in_group_code()
        if stuck and not self._is_settled:
            self._free()
            self._steps.add(now + _FREE_GRACE_S, self._kill)
            return
        self._kill_ranks([rank for rank in busy if rank in stuck])
        self._wait_for([rank for rank in busy if rank not in self._killed], now)

    def _wait_for(self, ranks: Sequence[int], now: float) -> None:
        if not ranks:
            return
        self._steps.add(min(now + _LOOK_WHILE_PATIENT_S, self._patient_until_s), self._kill)
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
