# SPDX-License-Identifier: Apache-2.0
"""`Execution`: runs one cell, call or request until it has ended on all ranks; after a failure, in three seconds."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from typing import Any

from ddpilot.errors import LaunchError, RankError, WatchError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.first_failure import RankEnd, build_error, choose_failure
from ddpilot.launching.rank_server.job import STORE
from ddpilot.launching.spawning import Ended, Wrote
from ddpilot.session.execution.outcome import CountMismatch, Outcome, Part
from ddpilot.session.execution.stop_steps import StopSteps
from ddpilot.session.kernels.cell_watch import CellObserver
from ddpilot.session.kernels.event_router import Event, KernelMessage, Turn
from ddpilot.session.kernels.manager import RankKernels
from ddpilot.session.kernels.states import START_OVER, blame_dead
from ddpilot.session.protocol.messages import BEGUN, Report

_LONGEST_WAIT_S = 0.5
_INTERNAL_KINDS = frozenset({"status", "error", "iopub_welcome", "debug_event"})


class Execution:
    """One cell, call or request: shows the output of its ranks, and ends it on all ranks after a failure or interrupt.

    `ids`: the id of the message sent to each rank; `number`: the number of the cell; `num_begun`: by rank, the number
    of collectives begun before, if known; `confirm_interrupt`: the first interrupt only shows how to cancel. `counts`
    compares how many collectives the ranks have begun, if all ranks run it and it succeeds. `make_observer` is called
    when it starts; the observer may also end it, and adds evidence to the error with which it ends.
    """

    def __init__(
        self,
        ids: Mapping[int, str],
        kernels: RankKernels,
        turn: Turn,
        *,
        name: str,
        number: int | None = None,
        quiet: bool = False,
        confirm_interrupt: bool = False,
        num_begun: Mapping[int, int | None] | None = None,
        counts: CountMismatch | None = None,
        make_observer: Callable[[], CellObserver | None] | None = None,
    ) -> None:
        before = num_begun or {}
        # Ranks that died before this turn are known here; later deaths arrive as events.
        gone = {rank: Ended(rank, None, reason) for rank, reason in dict(kernels.states.dead).items()}
        parts = {
            rank: Part(rank, sent, num_before=before.get(rank), ended=gone.get(rank)) for rank, sent in ids.items()
        }
        self._outcome = Outcome(parts)
        self._by_id = {part.message_id: part for part in parts.values()}
        self._kernels = kernels
        self._view = kernels.view
        self._name = name
        self._number = number
        self._turn = turn
        self._observer: CellObserver | None = None
        self._make_observer = make_observer
        self._counts = counts if len(ids) == kernels.world_size else None
        self._quiet = quiet
        self._confirms_interrupt = confirm_interrupt
        self._failures: list[RankEnd] = []
        self._stop_steps = StopSteps(kernels, self._outcome)

    def run(self) -> Outcome:
        """Wait until every part is over. Failures of ranks are returned in the outcome, not raised."""
        outcome = self._outcome
        self._kernels.states.note_work(outcome.parts, self._number, time.monotonic())
        self._view.begin(tuple(outcome.parts))
        try:
            if self._make_observer is not None:
                self._observer = self._make_observer()
            self._wait()
            if not outcome.was_aborted and self._counts is not None and (text := self._counts.describe(outcome)):
                self._view.note(text)
                outcome.has_mismatch = True
                self._stop_steps.free()
                self._wait()
            error = self._observer.close(is_ok=not outcome.was_aborted) if self._observer is not None else None
            if error is not None:
                outcome.error, outcome.is_group_intact = error, not outcome.has_mismatch
                self._view.error(error)
        finally:
            self._view.end()
        return outcome

    def _wait(self) -> None:
        while not self._is_over():
            try:
                self._take(self._turn.events.get(timeout=self._wait_s()))
                while not self._turn.events.empty():
                    self._take(self._turn.events.get_nowait())
            except queue.Empty:
                pass
            now = time.monotonic()
            self._view.show(now)
            self._judge(now)
            if self._outcome.was_aborted:
                self._stop_steps.run_due(now)
            elif self._observer is not None and not self._outcome.has_mismatch:
                self._end_with(self._observer.look(self._outcome.busy, now))

    def _is_over(self) -> bool:
        if self._outcome.was_aborted or self._outcome.has_mismatch:
            return not self._outcome.busy and self._stop_steps.is_done
        return not self._outcome.busy and not self._failures  # else the first failure in time has not been chosen yet

    def _wait_s(self) -> float:
        now = time.monotonic()
        dues = [self._view.next_due_s(), self._stop_steps.due_s]
        if self._failures and self._outcome.error is None:
            dues.append(now + 0.02)
        return max(0.001, min([_LONGEST_WAIT_S, *(due - now for due in dues if due is not None)]))

    # events

    def _take(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, KernelMessage):
            self._on_message(event, now)
        elif isinstance(event, Wrote):
            if not self._quiet:
                self._view.raw(event.rank, event.stream, event.data, now)
        elif isinstance(event, Ended) and event.rank == STORE:
            self._on_store_end(event)
        elif isinstance(event, Ended):
            self._on_ended(event, now)
        else:
            self._on_interrupt(now)

    def _on_message(self, message: KernelMessage, now: float) -> None:
        part = self._by_id.get(message.parent_id)
        if message.channel == "iopub":
            if message.kind == "status" and part is not None:
                part.is_idle = part.is_idle or message.content["execution_state"] == "idle"
                self._note_end(part)
            elif message.kind == BEGUN:
                self._on_begun(part, message.content)
            elif message.kind not in _INTERNAL_KINDS and not self._quiet:
                self._view.message(message, now)
        elif message.channel == "shell" and part is not None:
            part.report = Report.from_content(message.content) or Report()
            self._note_failure(part.rank, part.report, now)
            self._note_end(part)
        elif message.channel == "control":
            self._stop_steps.take_answer(message.parent_id, Report.from_content(message.content))
        elif message.channel == "stdin" and message.kind == "input_request":
            self._answer(message)

    def _note_end(self, part: Part) -> None:
        if part.is_over:
            self._kernels.states.set_idle(part.rank)

    def _on_begun(self, part: Part | None, content: Mapping[str, Any]) -> None:
        if part is not None:
            part.has_begun = True
            part.num_before = content["num_before"]
            if self._outcome.was_aborted:
                self._stop_steps.interrupt_late(part.rank)

    def _answer(self, request: KernelMessage) -> None:
        if self._outcome.was_aborted:
            return  # the rank is interrupted in `input`
        try:
            with self._turn.interrupts.raised():
                text = self._view.ask(request.rank, request.content["prompt"], request.content["password"])
        except KeyboardInterrupt:
            self._on_interrupt(time.monotonic())  # handled now: the next event may be the `input` of a different rank
            return
        except EOFError:
            text = "\x04"  # ipykernel's representation of end of input
        header = {"header": request.header}
        self._kernels.io_thread.send([request.rank], "stdin", "input_reply", {"value": text}, parent=header)

    def _note_failure(self, rank: int, report: Report, now: float) -> None:
        raised = report.raised
        if raised is None or (raised.interrupted and self._outcome.was_aborted):
            return
        self._kernels.states.raised[rank] = raised
        self._failures.append(RankEnd(rank=rank, raised=raised, since_s=now))

    def _on_ended(self, ended: Ended, now: float) -> None:
        part = self._outcome.parts.get(ended.rank)
        if part is not None:
            part.ended = ended
        self._stop_steps.forget(ended.rank)
        if ended.exited is not None and not self._outcome.was_aborted:
            self._failures.append(RankEnd(rank=ended.rank, exited=ended.exited, since_s=now))
        elif ended.exited is None and not self._outcome.was_aborted:
            found = f"rank {ended.rank} is gone: {ended.reason}"
            fix = f"`%ddp restart {ended.rank}` starts it again; other ranks keep their variables"
            ranks: tuple[int, ...] = (ended.rank,)
            if (loss := self._kernels.processes.find_loss(ended.rank)) is not None:
                found, ranks = loss.text, loss.ranks
                again = " ".join(map(str, ranks))
                fix = f"`%ddp restart {again}` starts them again if it can be reached; other ranks keep their variables"
            if not self._kernels.processes.can_start:
                fix = START_OVER
            did = f"running `{self._name}` on {len(self._outcome.parts)} ranks"
            hosts = set(map(self._kernels.processes.host_of, ranks))
            host = hosts.pop() if len(hosts) == 1 else ""
            self._fail(RankError(did, found=found, rank=ended.rank, host=host, fix=fix))

    def _on_store_end(self, ended: Ended) -> None:
        """Fail the cell: a rank may be entering a group, which waits for the store."""
        if ended.exited is None:  # the I/O thread has failed: no rank can be reached
            raise LaunchError(f"running {self._name}", found=ended.reason, fix=START_OVER)
        text = self._kernels.states.store_end
        if self._outcome.was_aborted:
            self._view.note(f"{text}; {START_OVER}")
        else:
            self._fail(LaunchError(f"running {self._name}", found=text, fix=START_OVER))

    def _on_interrupt(self, now: float) -> None:
        if self._confirms_interrupt:
            self._confirms_interrupt = False
            self._view.note("rebuilding the process group, which takes a moment; interrupt again to cancel")
            return
        if self._outcome.was_interrupted and self._stop_steps.due_s is not None:
            self._stop_steps.escalate(now)
            return
        busy = self._outcome.busy
        if busy:
            self._outcome.was_interrupted = True
            self._view.note(f"interrupting {render_ranks(busy)}")
            self._stop_steps.begin_after_stop(now)

    # failures

    def _silent_pids(self) -> list[int]:
        """Return the process ids of the ranks that have not reported how their part ended."""
        silent = [part.rank for part in self._outcome.parts.values() if part.report is None]
        return [pid for pid in map(self._kernels.processes.pid, silent) if pid is not None]

    def _judge(self, now: float) -> None:
        if self._outcome.was_aborted:
            return
        chosen = choose_failure(self._failures, now, self._silent_pids)
        if chosen is None:
            return
        others = [failure.rank for failure in self._failures if failure is not chosen and failure.is_victim]
        done = [part.rank for part in self._outcome.parts.values() if part.has_succeeded]
        error = build_error(
            chosen,
            function_name=self._name,
            num_ranks=len(self._outcome.parts),
            last_lines=self._kernels.last_lines(chosen.rank) if chosen.raised is None else (),
            victims=others,
            returned=done,
        )
        if self._kernels.processes.nodes is not None:
            error.host = self._kernels.processes.host_of(chosen.rank)
            error.args = (error.render(),)
        dead = self._kernels.states.dead
        if chosen.is_victim and dead:
            blame_dead(error, dead)
        elif chosen.is_victim and self._kernels.lost and len(others) + 1 == len(self._outcome.parts):
            error.fix = (
                f"{', '.join(self._kernels.lost)} were lost when the process group was rebuilt: "
                "if this code uses them, run the cells that create them again"
            )
            error.args = (error.render(),)
        if self._observer is not None and not (chosen.is_victim and dead.keys() - self._outcome.parts):
            self._observer.explain(error)  # not if ranks outside the cell are dead: the group then explains nothing
        self._fail(error)

    def _end_with(self, error: WatchError | None) -> None:
        if error is not None and not self._failures:  # else `_judge` builds a better error
            self._fail(error)

    def _fail(self, error: RankError | LaunchError) -> None:
        self._outcome.error = error
        self._view.error(error)
        self._stop_steps.begin_after_failure(time.monotonic())
