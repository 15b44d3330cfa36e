# SPDX-License-Identifier: Apache-2.0
"""Escalating steps for ranks that stay busy after a failure or an interrupt: interrupt, free the group, kill."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict

from ddpilot.findings.text import render_ranks
from ddpilot.launching.interrupts import Escalation
from ddpilot.record.flight_ring.reader import count_begun
from ddpilot.record.hook import ring_path
from ddpilot.session.execution.outcome import Outcome, find_count_mismatches, has_unfinished, is_in_group_code
from ddpilot.session.kernels.manager import RankKernels
from ddpilot.session.protocol.messages import FREE, Free, Report

_FREE_AFTER_STOP_S = 0.5
_AGAIN_AFTER_STOP_S = 1.2
_FREE_AFTER_FAILURE_S = 0.1
_CHECK_AGAIN_S = 0.05
_INTERRUPT_AFTER_FAILURE_S = 0.8
_FREE_STUCK_AFTER_FAILURE_S = 1.2
_AGAIN_AFTER_FAILURE_S = 1.6
_KILL_UNRESPONSIVE_AFTER_S = 2.0
_KILL_AFTER_S = 2.5
_FREE_LIMIT_S = 3.0
_FREE_GRACE_S = 1.0
"""Seconds that ranks have to finish after they were freed, even if the user interrupts again."""

_WAIT_LIMIT_S = 30.0
"""Seconds that a rank outside any collective may continue an uninterruptible operation after another rank's failure."""

_WAIT_INTERVAL_S = 1.0


class StopSteps:
    """Interrupts, frees and finally kills the busy ranks of `outcome`. Every step is reported in the view.

    A rank that is not in a collective may be in a long C++ operation that will return: it is killed only after a second
    interrupt, or `_WAIT_LIMIT_S` after the failure of another rank.
    """

    def __init__(self, kernels: RankKernels, outcome: Outcome) -> None:
        self._kernels = kernels
        self._outcome = outcome
        self._steps = Escalation()
        self._free_ids: dict[str, int] = {}
        self._freed_s = 0.0
        self._killed: set[int] = set()
        self._num_interrupts = 0
        self._is_waiting = False
        """True while waiting for ranks that cannot be interrupted."""
        self._wait_until_s = float("inf")
        self._level_until_s = 0.0
        """Until then, ranks that are level are not freed."""
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
        self._num_interrupts = 1
        self._is_waiting = False
        self._wait_until_s = float("inf")
        self._steps.start(
            (now, self._interrupt),
            (now + _FREE_AFTER_STOP_S, self._free_stuck),
            (now + _AGAIN_AFTER_STOP_S, self._interrupt),
            (now + _KILL_UNRESPONSIVE_AFTER_S, self._kill_unresponsive),
            (now + _KILL_AFTER_S, self._kill),
        )

    def begin_after_failure(self, now: float) -> None:
        """Start the steps that follow the failure of a rank, which ends the cell on all ranks."""
        self._wait_until_s = now + _WAIT_LIMIT_S
        self._level_until_s = now + _INTERRUPT_AFTER_FAILURE_S
        self._steps.start(
            (now + _FREE_AFTER_FAILURE_S, self._free_if_needed),
            (now + _INTERRUPT_AFTER_FAILURE_S, self._interrupt_others),
            (now + _FREE_STUCK_AFTER_FAILURE_S, self._free_in_group),
            (now + _AGAIN_AFTER_FAILURE_S, self._interrupt),
            (now + _KILL_UNRESPONSIVE_AFTER_S, self._kill_unresponsive),
            (now + _KILL_AFTER_S, self._kill),
        )

    def escalate(self, now: float) -> None:
        """Take the next step now and move the later ones forward.

        Killing still waits until freeing had time to take effect.
        """
        self._num_interrupts += 1
        if self._is_waiting:
            self._kill(now)
        elif self._steps.due_s is not None:
            is_kill = self._steps.next_step in (self._kill_unresponsive, self._kill)
            earliest_s = max(now, self._freed_s + _FREE_GRACE_S) if is_kill else now
            self._steps.advance(max(0.0, self._steps.due_s - earliest_s))

    def run_due(self, now: float) -> None:
        """Take the steps that are due. Once no rank is busy, decide whether the group is intact or has to be freed."""
        self._steps.run_due(now)
        if not self._is_settled and not self._outcome.busy:
            self._steps.clear()
            if self._is_group_untouched():
                self._is_settled = self._outcome.is_group_intact = True
            else:
                self.free()  # an interrupted rank leaves collectives of its peers unfinished

    def take_answer(self, message_id: str, report: Report | None) -> None:
        """Record the reply of a rank on the control channel."""
        if report is not None and message_id in self._free_ids:
            self._outcome.freed[self._free_ids.pop(message_id)] = report

    def forget(self, rank: int) -> None:
        """Expect no more replies from a rank that has died."""
        self._free_ids = {sent: other for sent, other in self._free_ids.items() if other != rank}

    def interrupt_late(self, rank: int) -> None:
        """Interrupt a rank that starts its part only now, after the cell has failed or was interrupted."""
        self._kernels.signal((rank,), signal.SIGINT)

    def _is_group_untouched(self) -> bool:
        """True if no rank has used the group in this cell, or all failed alike.

        False if ranks have begun different numbers of collectives in a group, also in earlier cells. False if a rank is
        outside the group: it may have begun to enter it, and the store already counts it as a member.
        """
        parts = self._outcome.parts
        by_rank = {rank: part.report for rank, part in parts.items() if part.report is not None}
        reports = [*by_rank.values()]
        if self._kernels.states.dead or len(reports) < len(parts) or not all(report.has_group for report in reports):
            return False
        return (
            len({(report.num_groups, report.num_group_names) for report in reports}) == 1
            and not any(report.in_backward for report in reports)
            and not find_count_mismatches(by_rank)
            and (all(report.num_collectives == 0 for report in reports) or self._have_failed_alike(reports))
        )

    def _have_failed_alike(self, reports: Sequence[Report]) -> bool:
        """True if every rank raised the same exception at the same line after the same number of collectives.

        False if a rank was interrupted or returned: it may have taken an optimizer step that other ranks have not.
        """
        raised = [report.raised for report in reports]
        return (
            len(reports) == self._kernels.world_size
            and all(each is not None and not each.is_victim and not each.interrupted for each in raised)
            and len({report.error for report in reports}) == 1
            and len({report.num_collectives for report in reports}) == 1
            and reports[0].num_collectives is not None
            and not any(has_unfinished(self._kernels.ring_folder, rank, p2p_only=True) for rank in self._outcome.parts)
        )

    def _needs_rebuild(self) -> bool:
        """True if the group has to be rebuilt.

        That is so if a rank is dead or outside the group, has begun a collective, or failed in a backward pass.
        """
        if self._kernels.states.dead:
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
        unreported = self._outcome.unreported
        stacks = self._kernels.read_stacks(unreported) if unreported else {}
        return {rank for rank in unreported if is_in_group_code(stacks.get(rank)) or self._is_in_collective(rank)}

    def _is_in_collective(self, rank: int) -> bool:
        return self._has_begun_one(rank) and has_unfinished(self._kernels.ring_folder, rank)

    def _has_begun_one(self, rank: int) -> bool:
        """True if the rank has begun a collective in this cell, or if that is unknown."""
        return self._num_begun(rank) != 0

    def _num_begun(self, rank: int) -> int | None:
        """Return the number of collectives that a rank has begun in this cell; None if that is unknown."""
        before, now = self._outcome.parts[rank].num_before, count_begun(ring_path(self._kernels.ring_folder, rank))
        return None if before is None or now is None else now - before

    def free(self) -> None:
        """Free all live ranks, which leave their groups."""
        kernels = self._kernels
        live = [rank for rank in range(kernels.world_size) if kernels.processes.is_live(rank)]
        kernels.hide_torch_logs(live)
        # After an interrupt the ranks have already received SIGINT and may be in their own clean-up code.
        interrupted = () if self._num_interrupts else self._outcome.interruptible
        self._free_ids = {}
        for interrupt in (True, False):
            ranks = [rank for rank in live if (rank in interrupted) is interrupt]
            request = Free(generation=kernels.generation, interrupt=interrupt)
            sent = kernels.io_thread.send(ranks, "control", FREE, asdict(request))
            self._free_ids |= {message_id: rank for rank, message_id in sent.items() if message_id}
        self._freed_s = time.monotonic()
        self._is_settled = True

    def _free_if_needed(self, now: float) -> None:
        """Free all ranks once the group has to be rebuilt anyway; until then check again later."""
        if self._is_settled or not self._outcome.busy:
            return
        if self._needs_rebuild() and not (now < self._level_until_s and self._are_level()):
            self.free()
        else:
            self._steps.add(now + _CHECK_AGAIN_S, self._free_if_needed)

    def _are_level(self) -> bool:
        """True if ranks raised, and all have begun equally many collectives: the busy ones may be about to fail alike.

        On a busy machine, ranks that raise the same error report it at different times.
        """
        parts = self._outcome.parts
        reports = [part.report for part in parts.values() if part.report is not None]
        counts = {report.num_collectives for report in reports}
        counts |= {self._num_begun(part.rank) for part in parts.values() if part.report is None}
        are_plain = all(
            report.has_group and not report.in_backward and report.raised is not None and not report.raised.is_victim
            for report in reports
        )
        return bool(reports) and are_plain and len(counts) == 1 and None not in counts and not self._kernels.states.dead

    def _free_in_group(self, _now: float) -> None:
        """Free all ranks if one waits for others without having begun a collective, as in `new_group`."""
        if not self._is_settled and self._outcome.unreported and self._in_group_code():
            self.free()

    def _free_stuck(self, now: float) -> None:
        unreported = self._outcome.unreported
        if unreported and (self._needs_rebuild() or self._in_group_code()):
            them = "it" if len(unreported) == 1 else "them"
            self._kernels.view.note(f"{render_ranks(unreported)} did not stop; freeing the process group under {them}")
            self.free()
        elif unreported:
            self._steps.add(now + _WAIT_INTERVAL_S, self._free_in_group)

    def _interrupt(self, _now: float) -> None:
        self._kernels.signal(self._outcome.interruptible, signal.SIGINT)

    def _interrupt_others(self, now: float) -> None:
        busy = self._outcome.busy
        if busy:
            self._kernels.view.note(f"interrupting {render_ranks(busy)}, still busy with the cell that failed")
            self._interrupt(now)

    def _kill_unresponsive(self, _now: float) -> None:
        """After a second interrupt, kill ranks that did not reply to the request to free them.

        None of their threads runs, because C code holds the GIL.
        """
        silent = set(self._free_ids.values())
        if self._num_interrupts > 1:
            self._kill_ranks([rank for rank in self._outcome.busy if rank in silent])

    def _kill(self, now: float) -> None:
        """Kill the busy ranks that are stuck in a collective, freeing the group first, and wait for the others.

        All of them are killed after a second interrupt, or `_WAIT_LIMIT_S` after the failure of another rank.
        """
        busy = self._outcome.busy
        if self._num_interrupts > 1 or now >= self._wait_until_s:
            self._kill_ranks(busy)
            return
        stuck = self._in_group_code()
        if stuck and not self._is_settled:
            self.free()
            self._steps.add(now + _FREE_GRACE_S, self._kill)
            return
        self._kill_ranks([rank for rank in busy if rank in stuck])
        self._wait_for([rank for rank in busy if rank not in self._killed], now)

    def _wait_for(self, ranks: Sequence[int], now: float) -> None:
        if not ranks:
            return
        self._steps.add(min(now + _WAIT_INTERVAL_S, self._wait_until_s), self._kill)
        if not self._is_waiting and self._outcome.unreported:
            self._is_waiting = True
            press = "press stop again" if self._num_interrupts else "press stop twice"
            lost = "its variables are" if len(ranks) == 1 else "their variables are"
            self._kernels.view.note(
                f"waiting for {render_ranks(ranks)}, in an operation that cannot be interrupted; {press} to kill "
                f"{'it' if len(ranks) == 1 else 'them'} ({lost} lost then)"
            )

    def _kill_ranks(self, ranks: Collection[int]) -> None:
        ranks = [rank for rank in ranks if rank not in self._killed]
        self._killed.update(ranks)
        if ranks:
            reasons = {reason for rank in ranks for reason in self._still_stuck(rank)}
            self._kernels.view.note(
                f"killing {render_ranks(ranks)}, which did not respond; the variables there are lost"
                + "".join(f" ({reason})" for reason in sorted(reasons))
            )
            self._kernels.states.note_kill(ranks)
            self._kernels.signal(ranks, signal.SIGKILL)

    def _still_stuck(self, rank: int) -> list[str]:
        freed = self._outcome.freed.get(rank)
        return [] if freed is None or not freed.value else list(freed.value["still_stuck"])
