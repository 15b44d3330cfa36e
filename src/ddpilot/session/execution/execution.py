# SPDX-License-Identifier: Apache-2.0
"""`Execution`: runs one cell, call or request until all its ranks have ended it; after a failure, in three seconds."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ddpilot.errors import LaunchError, RankError, WatchError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.failures import Failure, build_error, choose_failure
from ddpilot.launching.rank_reports import Raised
from ddpilot.launching.rank_server.job import STORE
from ddpilot.launching.spawning import Ended, Wrote
from ddpilot.output.view import RankMessage
from ddpilot.session.execution.collective_counts import CountMismatch
from ddpilot.session.execution.outcome import Outcome, Part
from ddpilot.session.execution.stop_steps import StopSteps
from ddpilot.session.kernels.event_router import InterruptListener
from ddpilot.session.kernels.events import Event, KernelMessage
from ddpilot.session.kernels.manager import Ranks
from ddpilot.session.kernels.states import START_OVER, blame_dead
from ddpilot.session.protocol.report import BEGUN, Report

_LONGEST_WAIT_S = 0.5
_INTERNAL_KINDS = frozenset({"status", "execute_input", "error", "iopub_welcome", "debug_event"})


class CellObserver(Protocol):
    """Interface for watching from outside what the ranks of a cell do together."""

    def look(self, busy: Sequence[int], now_s: float) -> WatchError | None:
        """Called at least twice per second while nothing has failed. Returns an error to end the cell with, or None."""

    def explain(self, error: RankError) -> None:
        """Add evidence to `error`, with which the cell ends."""

    def close(self, *, is_ok: bool) -> WatchError | None:
        """The cell is over; `is_ok` is True if it succeeded. Returns an error to end it with nevertheless, or None."""


class Execution:
    """Waits for `parts`, shows the output of the ranks, and ends all parts after a failure or an interrupt.

    `lookout` may also end it, and adds evidence to the error with which it ends. `counts` compares how many collectives
    the ranks have begun, if it ends well.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        ranks: Ranks,
        *,
        name: str,
        events: queue.SimpleQueue[Event],
        lookout: CellObserver | None = None,
        quiet: bool = False,
        patient: bool = False,
        counts: CountMismatch | None = None,
    ) -> None:
        self._outcome = Outcome({part.rank: part for part in parts})
        self._by_id = {part.message_id: part for part in parts}
        self._ranks = ranks
        self._name = name
        self._events = events
        self._lookout = lookout
        self._counts = counts
        self._quiet = quiet
        self._is_patient = patient
        self._failures: list[Failure] = []
        self._ladder = StopSteps(ranks, self._outcome)

    def run(self, stops: InterruptListener) -> Outcome:
        """Wait until every part is over. Failures of ranks are returned in the outcome, not raised."""
        self._wait(stops)
        if not self._outcome.was_cut and self._counts is not None and (text := self._counts.describe(self._outcome)):
            self._ranks.view.note(text)
            self._outcome.is_uneven = True
            self._ladder.free_after_end()
            self._wait(stops)
        error = self._lookout.close(is_ok=not self._outcome.was_cut) if self._lookout is not None else None
        if error is not None:
            self._outcome.error, self._outcome.spared_group = error, not self._outcome.is_uneven
            self._ranks.view.error(error)
        return self._outcome

    def _wait(self, stops: InterruptListener) -> None:
        while not self._is_over():
            try:
                self._take(self._events.get(timeout=self._wait_s()), stops)
                while not self._events.empty():
                    self._take(self._events.get_nowait(), stops)
            except queue.Empty:
                pass
            now = time.monotonic()
            self._ranks.view.show(now)
            self._judge(now)
            if self._outcome.was_cut:
                self._ladder.climb(now)
            elif self._lookout is not None and not self._outcome.is_uneven:
                self._end_with(self._lookout.look(self._outcome.busy, now))

    def _is_over(self) -> bool:
        if self._outcome.was_cut or self._outcome.is_uneven:
            return not self._outcome.busy and self._ladder.is_done
        return not self._outcome.busy and not self._failures  # else the first failure in time has not been chosen yet

    def _wait_s(self) -> float:
        now = time.monotonic()
        dues = [self._ranks.view.next_due_s(), self._ladder.due_s]
        if self._failures and self._outcome.error is None:
            dues.append(now + 0.02)
        return max(0.001, min([_LONGEST_WAIT_S, *(due - now for due in dues if due is not None)]))

    # events

    def _take(self, event: Event, stops: InterruptListener) -> None:
        now = time.monotonic()
        if isinstance(event, KernelMessage):
            self._on_said(event, stops, now)
        elif isinstance(event, Wrote):
            if not self._quiet:
                self._ranks.view.raw(event.rank, event.stream, event.data, now)
        elif isinstance(event, Ended) and event.rank == STORE:
            self._on_store_end(event)
        elif isinstance(event, Ended):
            self._on_ended(event, now)
        else:
            self._on_stop(now)

    def _on_said(self, said: KernelMessage, stops: InterruptListener, now: float) -> None:
        part = self._by_id.get(said.parent_id)
        if said.channel == "iopub":
            if said.kind == "status" and part is not None:
                part.is_idle = part.is_idle or said.content["execution_state"] == "idle"
                if part.is_over:
                    self._ranks.standing.set_idle(part.rank)
            elif said.kind == BEGUN:
                self._on_begun(part, said.content)
            elif said.kind not in _INTERNAL_KINDS and not self._quiet:
                message = RankMessage(said.rank, said.kind, said.content, said.metadata, said.buffers)
                self._ranks.view.message(message, now)
        elif said.channel == "shell" and part is not None:
            part.report = Report.from_content(said.content) or Report(status="ok", time_s=now)
            self._note_failure(part, part.report, now)
            if part.is_over:
                self._ranks.standing.set_idle(part.rank)
        elif said.channel == "control":
            self._ladder.take_answer(said.parent_id, Report.from_content(said.content))
        elif said.channel == "stdin" and said.kind == "input_request":
            self._answer(said, stops)

    def _on_begun(self, part: Part | None, content: Mapping[str, Any]) -> None:
        if part is not None:
            part.has_begun = True
            part.num_before = content["num_before"]
            if self._outcome.was_cut:
                self._ladder.interrupt_late(part.rank)

    def _answer(self, said: KernelMessage, stops: InterruptListener) -> None:
        if self._outcome.was_cut:
            return  # the rank is interrupted in `input`
        try:
            with stops.raised():
                text = self._ranks.view.ask(said.rank, said.content["prompt"], said.content["password"])
        except KeyboardInterrupt:
            self._on_stop(time.monotonic())  # handled now: the next event may be the `input` of another rank
            return
        except EOFError:
            text = "\x04"  # ipykernel's representation of end of input
        header = {"header": said.header}
        self._ranks.hub.send(said.rank, "stdin", "input_reply", {"value": text}, parent=header)

    def _note_failure(self, part: Part, report: Report, now: float) -> None:
        if report.status == "ok" or (report.interrupted and self._outcome.was_cut):
            return
        raised = Raised(
            time_s=report.time_s,
            type_name=report.type_name,
            message=report.message,
            traceback=report.traceback,
            is_victim=report.is_victim,
            interrupted=report.interrupted,
            exitcode=report.exitcode,
        )
        self._ranks.standing.raised[part.rank] = raised
        self._failures.append(Failure(rank=part.rank, raised=raised, exited=None, error=None, since_s=now))

    def _on_ended(self, ended: Ended, now: float) -> None:
        part = self._outcome.parts.get(ended.rank)
        if part is not None:
            part.ended = ended
        self._ladder.forget(ended.rank)
        if ended.exited is not None and not self._outcome.was_cut:
            self._failures.append(Failure(rank=ended.rank, raised=None, exited=ended.exited, error=None, since_s=now))
        elif ended.exited is None and not self._outcome.was_cut:
            self._fail_without_exit(ended)

    def _on_store_end(self, ended: Ended) -> None:
        """Fail the cell: a rank may be entering a group, which waits for the store."""
        if ended.exited is None:  # the hub's thread has failed: no rank can be reached
            raise LaunchError(f"running {self._name}", found=ended.reason, fix=START_OVER)
        text = self._ranks.standing.store_end
        if self._outcome.was_cut:
            self._ranks.view.note(f"{text}; {START_OVER}")
        else:
            self._fail(LaunchError(f"running {self._name}", found=text, fix=START_OVER))

    def _fail_without_exit(self, ended: Ended) -> None:
        self._fail(
            RankError(
                f"running {self._name}",
                found=f"rank {ended.rank} is gone: {ended.reason}",
                rank=ended.rank,
                host="",
                fix="Start the session again",
            )
        )

    def _on_stop(self, now: float) -> None:
        if self._is_patient:
            self._is_patient = False
            self._ranks.view.note("rebuilding the process group, which takes a moment; interrupt again to cancel")
            return
        if self._outcome.was_stopped and self._ladder.due_s is not None:
            self._ladder.hurry(now)
            return
        busy = self._outcome.busy
        if busy:
            self._outcome.was_stopped = True
            self._ranks.view.note(f"interrupting {render_ranks(busy)}")
            self._ladder.begin_after_stop(now)

    # failures

    def _unheard(self) -> list[int]:
        silent = [part.rank for part in self._outcome.parts.values() if part.report is None]
        return [pid for pid in map(self._ranks.host.pid, silent) if pid is not None]

    def _judge(self, now: float) -> None:
        if self._outcome.was_cut:
            return
        chosen = choose_failure(self._failures, now, self._unheard)
        if chosen is None:
            return
        others = [failure.rank for failure in self._failures if failure is not chosen and failure.is_victim]
        done = [part.rank for part in self._outcome.parts.values() if part.report and part.report.status == "ok"]
        error = build_error(
            chosen,
            function_name=self._name,
            num_ranks=len(self._outcome.parts),
            last_lines=self._ranks.tails.last_lines(chosen.rank) if chosen.raised is None else (),
            victims=others,
            returned=done,
        )
        dead = self._ranks.standing.dead
        if chosen.is_victim and dead:
            blame_dead(error, dead)
        elif chosen.is_victim and self._ranks.lost and len(others) + 1 == len(self._outcome.parts):
            error.fix = (
                f"{', '.join(self._ranks.lost)} went with a process group that was rebuilt: "
                "if this uses them, run the cells that made them again"
            )
            error.args = (error.render(),)
        if self._lookout is not None and not (chosen.is_victim and dead.keys() - self._outcome.parts):
            self._lookout.explain(error)  # not if ranks outside the cell are dead: the group then explains nothing
        self._fail(error)

    def _end_with(self, error: WatchError | None) -> None:
        if error is not None and not self._failures:  # else `_judge` builds a better error
            self._fail(error)

    def _fail(self, error: RankError | LaunchError) -> None:
        self._outcome.error = error
        self._ranks.view.error(error)
        self._ladder.begin_after_failure(time.monotonic())
