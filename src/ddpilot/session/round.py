# SPDX-License-Identifier: Apache-2.0
"""One cell, call or request on some ranks, until it is over on all of them: in at most three seconds once it failed."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from ddpilot.errors import RankError
from ddpilot.findings.words import render_ranks
from ddpilot.launching.failures import Failure, build_error, choose_failure
from ddpilot.launching.local.report import Raised
from ddpilot.session.events import Ended, Event, Interrupted, Said, Wrote
from ddpilot.session.hosts import RankHost
from ddpilot.session.hub import Hub
from ddpilot.session.outcome import Outcome, Part
from ddpilot.session.report import FREE, Report
from ddpilot.session.stops import Stops
from ddpilot.session.tails import Tails
from ddpilot.session.view import RankMessage, View

_FREE_AFTER_STOP_S = 0.5
_AGAIN_AFTER_STOP_S = 1.2
_KILL_SILENT_AFTER_S = 2.0
_KILL_AFTER_S = 2.5
_FREE_AFTER_FAILURE_S = 0.1
_INTERRUPT_AFTER_FAILURE_S = 0.8
_AGAIN_AFTER_FAILURE_S = 1.6
_FREE_LIMIT_S = 3.0
_LONGEST_WAIT_S = 0.5
_INTERNAL_KINDS = frozenset({"status", "execute_input", "error", "iopub_welcome", "debug_event"})


class Round:
    """Waits for `parts`, shows what the ranks say, and sees to it that a failure or a stop ends all of them."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        name: str,
        hub: Hub,
        host: RankHost,
        view: View,
        tails: Tails,
        events: queue.SimpleQueue[Event],
        dead: Mapping[int, str],
        done: Callable[[int], None],
        killed: Callable[[Sequence[int]], None],
        quiet: bool = False,
        patient: bool = False,
    ) -> None:
        self._outcome = Outcome({part.rank: part for part in parts})
        self._by_id = {part.message_id: part for part in parts}
        self._name = name
        self._hub = hub
        self._host = host
        self._view = view
        self._tails = tails
        self._events = events
        self._dead = dead
        self._done = done
        self._quiet = quiet
        self._is_patient = patient
        self._killed = killed
        self._failures: list[Failure] = []
        self._steps: list[tuple[float, Callable[[], None]]] = []
        self._free_ids: dict[str, int] = {}
        self._free_until_s = 0.0
        self._freed_or_spared = False

    def run(self, stops: Stops) -> Outcome:
        """Wait for the end of every part. Raises nothing of the ranks': it is all in the outcome."""
        while not self._is_over():
            try:
                self._take(self._events.get(timeout=self._wait_s()), stops)
                while not self._events.empty():
                    self._take(self._events.get_nowait(), stops)
            except queue.Empty:
                pass
            now = time.monotonic()
            self._view.show(now)
            self._judge(now)
            self._climb(now)
        return self._outcome

    def _is_over(self) -> bool:
        if self._failures and self._outcome.error is None and not self._outcome.was_stopped:
            return False  # the first one in time is not chosen yet
        if self._steps_were_begun and not self._freed_or_spared:
            return False
        waits_for_freed = bool(self._free_ids) and time.monotonic() < self._free_until_s
        return all(part.is_over for part in self._outcome.parts.values()) and not waits_for_freed

    def _wait_s(self) -> float:
        now = time.monotonic()
        dues = [self._view.next_due_s(), self._steps[0][0] if self._steps else None]
        if self._failures and self._outcome.error is None:
            dues.append(now + 0.02)
        return max(0.001, min([_LONGEST_WAIT_S, *(due - now for due in dues if due is not None)]))

    def _busy(self) -> tuple[int, ...]:
        return tuple(part.rank for part in self._outcome.parts.values() if not part.is_over)

    # what comes in

    def _take(self, event: Event, stops: Stops) -> None:
        now = time.monotonic()
        if isinstance(event, Said):
            self._on_said(event, stops, now)
        elif isinstance(event, Wrote):
            if not self._quiet:
                self._view.raw(event.rank, event.stream, event.data, now)
        elif isinstance(event, Ended):
            self._on_ended(event, now)
        else:
            self._on_stop(now)

    def _on_said(self, said: Said, stops: Stops, now: float) -> None:
        part = self._by_id.get(said.parent_id)
        if said.channel == "iopub":
            if said.kind == "status" and part is not None:
                part.is_idle = part.is_idle or said.content["execution_state"] == "idle"
                if part.is_over:
                    self._done(part.rank)
            elif said.kind not in _INTERNAL_KINDS and not self._quiet:
                message = RankMessage(said.rank, said.kind, said.content, said.metadata, said.buffers)
                self._view.message(message, now)
        elif said.channel == "shell" and part is not None:
            part.report = Report.from_content(said.content) or Report(status="ok", time_s=now)
            self._note_failure(part, part.report, now)
            if part.is_over:
                self._done(part.rank)
        elif said.channel == "control" and said.parent_id in self._free_ids:
            report = Report.from_content(said.content)
            if report is not None:
                self._outcome.freed[self._free_ids.pop(said.parent_id)] = report
        elif said.channel == "stdin" and said.kind == "input_request":
            self._answer(said, stops)

    def _answer(self, said: Said, stops: Stops) -> None:
        try:
            with stops.raised():
                text = self._view.ask(said.rank, said.content["prompt"], said.content["password"])
        except KeyboardInterrupt:
            self._events.put(Interrupted())
            return
        except EOFError:
            text = "\x04"  # as ipykernel spells the end of input
        header = {"header": said.header}
        self._hub.send(said.rank, "stdin", "input_reply", {"value": text}, parent=header)

    def _note_failure(self, part: Part, report: Report, now: float) -> None:
        if report.status == "ok" or (report.interrupted and self._steps_were_begun):
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
        self._failures.append(Failure(rank=part.rank, raised=raised, exited=None, error=None, since_s=now))

    @property
    def _steps_were_begun(self) -> bool:
        return self._outcome.was_stopped or self._outcome.error is not None

    def _on_ended(self, ended: Ended, now: float) -> None:
        part = self._outcome.parts.get(ended.rank)
        if part is not None:
            part.ended = ended
        self._free_ids = {sent: rank for sent, rank in self._free_ids.items() if rank != ended.rank}
        if ended.exited is not None and not self._steps_were_begun:
            self._failures.append(Failure(rank=ended.rank, raised=None, exited=ended.exited, error=None, since_s=now))
        elif ended.exited is None and not self._steps_were_begun:
            self._fail_without_exit(ended)

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
            self._view.note("the process group is being made anew, which ends in a moment; stop again to give that up")
            return
        if self._outcome.was_stopped and self._steps:
            early_s = self._steps[0][0] - now  # once more: the next step now, those after it in their time
            self._steps = [(due_s - early_s, step) for due_s, step in self._steps]
            return
        busy = self._busy()
        if not busy:
            return
        self._outcome.was_stopped = True
        self._view.note(f"interrupting {render_ranks(busy)}")
        self._steps = [
            (now, self._interrupt),
            (now + _FREE_AFTER_STOP_S, self._free_stuck),
            (now + _AGAIN_AFTER_STOP_S, self._interrupt),
            (now + _KILL_SILENT_AFTER_S, self._kill_silent),
            (now + _KILL_AFTER_S, self._kill),
        ]

    # what is done about it

    def _judge(self, now: float) -> None:
        if self._steps_were_begun:
            return
        chosen = choose_failure(self._failures, now)
        if chosen is None:
            return
        others = [failure.rank for failure in self._failures if failure is not chosen and failure.is_victim]
        done = [part.rank for part in self._outcome.parts.values() if part.report and part.report.status == "ok"]
        error = build_error(
            chosen,
            function_name=self._name,
            num_ranks=len(self._outcome.parts),
            last_lines=self._tails.last_lines(chosen.rank) if chosen.raised is None else (),
            victims=others,
            returned=done,
        )
        if chosen.is_victim and self._dead:
            gone = "; ".join(f"rank {rank} {reason}" for rank, reason in sorted(self._dead.items()))
            error.others = f"It needed a rank that is dead: {gone}. `restart` brings it back. {error.others}".rstrip()
        self._fail(error)

    def _fail(self, error: RankError) -> None:
        now = time.monotonic()
        self._outcome.error = error
        self._view.error(error)
        self._steps = [
            (now + _FREE_AFTER_FAILURE_S, self._free),
            (now + _INTERRUPT_AFTER_FAILURE_S, self._interrupt_others),
            (now + _AGAIN_AFTER_FAILURE_S, self._interrupt),
            (now + _KILL_SILENT_AFTER_S, self._kill_silent),
            (now + _KILL_AFTER_S, self._kill),
        ]
        self._climb(now)

    def _climb(self, now: float) -> None:
        while self._steps and self._steps[0][0] <= now:
            _, step = self._steps.pop(0)
            step()
        if self._steps_were_begun and not self._freed_or_spared and not self._busy():
            self._steps.clear()
            if self._is_group_untouched():
                self._freed_or_spared = self._outcome.spared_group = True
            else:
                self._free()  # a rank that was cut short has left its peers' collectives half done

    def _is_group_untouched(self) -> bool:
        parts = self._outcome.parts.values()
        reports = [part.report for part in parts]
        return not self._dead and all(
            report is not None and report.num_collectives == 0 and not report.in_backward for report in reports
        )

    def _free(self) -> None:
        live = [rank for rank in range(self._host.world_size) if self._host.is_live(rank)]
        sent = {self._hub.send(rank, "control", FREE, {}): rank for rank in live}
        self._free_ids = {message_id: rank for message_id, rank in sent.items() if message_id}
        self._free_until_s = time.monotonic() + _FREE_LIMIT_S
        self._freed_or_spared = True

    def _free_stuck(self) -> None:
        busy = self._busy()
        if busy:
            self._view.note(f"{render_ranks(busy)} did not stop; freeing the process group under them")
            self._free()

    def _interrupt(self) -> None:
        self._signal(self._busy(), signal.SIGINT)

    def _interrupt_others(self) -> None:
        busy = self._busy()
        if busy:
            self._view.note(f"interrupting {render_ranks(busy)}, still busy with the cell that failed")
            self._signal(busy, signal.SIGINT)

    def _kill_silent(self) -> None:
        """Kill those of which no thread has answered since: C code holds the interpreter lock there."""
        silent = set(self._free_ids.values())
        self._kill_ranks([rank for rank in self._busy() if rank in silent])

    def _kill(self) -> None:
        self._kill_ranks(self._busy())

    def _kill_ranks(self, ranks: Sequence[int]) -> None:
        if ranks:
            self._view.note(f"killing {render_ranks(ranks)}, which nothing else stops; the variables there are lost")
            self._killed(ranks)
            self._signal(ranks, signal.SIGKILL)

    def _signal(self, ranks: Sequence[int], number: int) -> None:
        if ranks:
            self._hub.post(lambda: self._host.signal(ranks, number))
