# SPDX-License-Identifier: Apache-2.0
"""`Runner`: runs cells and requests on ranks, and recovers from failures by rebuilding the process group."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ddpilot.errors import LaunchError, LaunchInterrupted
from ddpilot.findings.text import render_ranks
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.spawning import Ended
from ddpilot.record.main_thread import connecting_path
from ddpilot.session.execution.collective_counts import CountMismatch, count_begun
from ddpilot.session.execution.execution import CellObserver, Execution
from ddpilot.session.execution.outcome import Outcome, Part
from ddpilot.session.kernels.cell_watch import FindingsObserver, SubsetObserver
from ddpilot.session.kernels.event_router import InterruptListener
from ddpilot.session.kernels.events import Event, KernelMessage
from ddpilot.session.kernels.manager import Ranks
from ddpilot.session.kernels.states import START_OVER, describe_device_error
from ddpilot.session.protocol.parcels import ParcelCall
from ddpilot.session.protocol.report import REPORT_KEY, REQUEST, Report


class Runner:
    """Runs cells and requests on ranks. After a failure the group is freed and rebuilt; all variables are kept."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._uneven = CountMismatch(ranks.ring_folder)
        self._wants_group = False
        self._backend: str | None = None
        self._is_broken = False
        """True if rebuilding the group has failed."""
        self._is_down = False
        """True if the ranks have left their group and not entered a new one."""
        self._fresh: frozenset[int] = frozenset()
        """Ranks that are being restarted."""
        self._unfinished: set[int] = set()
        """Ranks on whose devices collectives were aborted since the last rebuild."""

    def cell(self, code: str, ranks: Sequence[int], *, number: int, quiet: bool, keep_cache: bool) -> Outcome:
        """Run a cell on `ranks`, and recover if it fails."""
        content = {
            "code": code,
            "silent": False,
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": not quiet,
            "stop_on_error": False,
        }
        with self._ranks.turn(f"running cell {number}") as (events, stops):
            self._mend(events, stops)
            about = {"cell": number, "ranks": self._subset(ranks), "keep_cache": keep_cache, "blocked": self._blocked()}
            num_begun = self._num_begun(ranks)
            ids = {
                rank: self._ranks.hub.send(rank, "shell", "execute_request", content, {REPORT_KEY: about})
                for rank in ranks
            }
            name = f"Cell In[{number}]"
            sources = {name: code}
            outcome = self._watch(
                ids, name, events, stops, number=number, quiet=quiet, sources=sources, num_begun=num_begun
            )
            self._recover(outcome, events, stops)
        return outcome

    def call(self, verb: str, arguments: dict[str, Any], ranks: Sequence[int], parcel: int | None, name: str) -> Any:
        """Send a request with a parcel to `ranks`; return the outcome and, by rank, the parcels that they replied with.

        Recovers if the request fails.
        """
        answers: dict[int, int] = {}
        calls: dict[int, ParcelCall] = {}
        with self._ranks.turn(f"running {name}") as (events, stops):
            self._mend(events, stops)
            num_begun = self._num_begun(ranks)
            try:
                ids = {}
                for rank in ranks:
                    token = uuid.uuid4().hex
                    calls[rank] = ParcelCall(self._ranks.parcel_socket(rank), token, parcel)
                    ids[rank] = self._ask(rank, verb, {**arguments, "token": token}, ranks)
                sources: dict[str, str] | None = {} if verb == "call" else None
                outcome = self._watch(ids, name, events, stops, sources=sources, num_begun=num_begun)
                for rank, part in outcome.parts.items():
                    report = part.report
                    has_replied = report is not None and verb != "push" and (verb == "call" or report.status == "ok")
                    if has_replied and (answer := calls[rank].answer()) is not None:
                        answers[rank] = answer
                self._recover(outcome, events, stops)
            except BaseException:
                fd_socket.close_all(answers.values())
                raise
            finally:
                for each in calls.values():
                    each.close()
        return outcome, answers

    def restart(self, ranks: Sequence[int]) -> None:
        """Restart the processes of `ranks` under the same rank numbers, and rebuild the group if one was in use."""
        with self._ranks.turn(f"restarting {render_ranks(ranks)}") as (events, stops):
            self._restart(ranks, events, stops)

    def ask_kernel(self, kind: str, content: dict[str, Any], rank: int, limit_s: float) -> dict[str, Any] | None:
        """Return the kernel's reply to a "complete" or "inspect" request.

        None if the rank is busy or does not reply within `limit_s` seconds.
        """
        deadline_s = time.monotonic() + limit_s
        try:
            with self._ranks.turn(f"asking rank {rank} to {kind}") as (events, _):
                sent = self._ranks.hub.send(rank, "shell", f"{kind}_request", content)
                while (left_s := deadline_s - time.monotonic()) > 0:
                    event = events.get(timeout=left_s)
                    if isinstance(event, KernelMessage) and event.parent_id == sent and event.kind == f"{kind}_reply":
                        return event.content
                    self._ranks.outside.show(event)
        except (LaunchError, queue.Empty):
            pass
        return None

    def finish(self) -> None:
        """Ask the ranks to end, so that apps and exit handlers run. A rank that is busy does not react in time."""
        live = self._ranks.standing.live
        self._ranks.outside.is_ending = True
        for rank in live:
            self._ask(rank, "finish", {}, live)
        self._ranks.standing.await_ends(live)

    def _subset(self, ranks: Sequence[int]) -> list[int]:
        return [] if len(ranks) == self._ranks.world_size else list(ranks)

    def _num_begun(self, ranks: Sequence[int]) -> dict[int, int | None]:
        """Return the number of collectives that each rank has begun. Called before a cell is sent to the ranks.

        A cell may hold the GIL from its first line on, so that the rank's threads neither report anything nor remove
        their file about a connection to a store. A file left by an idle rank is out of date, and is removed here.
        """
        for rank in ranks:
            connecting_path(self._ranks.ring_folder, rank).unlink(missing_ok=True)
        return {rank: count_begun(self._ranks.ring_folder, rank) for rank in ranks}

    def _ask(self, rank: int, verb: str, arguments: dict[str, Any], ranks: Sequence[int]) -> str:
        content = {"verb": verb, "arguments": arguments, "ranks": self._subset(ranks), "blocked": self._blocked()}
        return self._ranks.hub.send(rank, "shell", REQUEST, content)

    def _watch(
        self,
        ids: dict[int, str],
        name: str,
        events: queue.SimpleQueue[Event],
        stops: InterruptListener,
        *,
        number: int | None = None,
        quiet: bool = False,
        patient: bool = False,
        sources: Mapping[str, str] | None = None,
        num_begun: Mapping[int, int | None] | None = None,
    ) -> Outcome:
        ranks = self._ranks
        before = num_begun or {}
        now = time.monotonic()
        ranks.standing.note_work(ids, number, now)
        ranks.view.begin(tuple(ids))
        # Ranks that died before this turn are known here; later deaths arrive as events.
        gone = {rank: Ended(rank, None, reason) for rank, reason in dict(ranks.standing.dead).items()}
        parts = [
            Part(rank, message_id, num_before=before.get(rank), ended=gone.get(rank))
            for rank, message_id in ids.items()
        ]
        try:
            return Execution(
                parts,
                ranks,
                name=name,
                events=events,
                lookout=None if sources is None else self._make_lookout(tuple(ids), name, now, sources),
                patient=patient,
                quiet=quiet,
                counts=None if sources is None or len(ids) < ranks.world_size else self._uneven,
            ).run(stops)
        finally:
            ranks.view.end()

    def _make_lookout(
        self, ids: Sequence[int], name: str, now: float, sources: Mapping[str, str]
    ) -> CellObserver | None:
        ranks = self._ranks
        others = {*ranks.standing.live} - {*ids}
        if others:
            return SubsetObserver(ids, others, folder=ranks.ring_folder, name=name, note=ranks.view.note)
        return None if ranks.watcher is None else FindingsObserver(ranks.watcher, name, now, sources, ranks.view.note)

    # recovery

    def _mend(self, events: queue.SimpleQueue[Event], stops: InterruptListener) -> None:
        """Before new work: restart unusable ranks if the session respawns, or retry a rebuild that failed."""
        if self._ranks.options.respawn and self._ranks.standing.unusable:
            self._respawn(events, stops)
        elif self._is_broken:
            self._regroup(events, stops)

    def _respawn(self, events: queue.SimpleQueue[Event], stops: InterruptListener) -> None:
        ranks = self._ranks.standing.unusable
        self._restart(ranks, events, stops)
        self._ranks.view.note(f"{render_ranks(ranks)} restarted (`respawn`), with no variables")

    def _restart(self, ranks: Sequence[int], events: queue.SimpleQueue[Event], stops: InterruptListener) -> None:
        self._ranks.host.check_start(f"restarting {render_ranks(ranks)}")
        try:
            for rank in ranks:
                self._ranks.end_process(rank, events)
            self._ranks.start_processes(ranks, events)
        except KeyboardInterrupt:
            self._give_up_restart(ranks, events, stops)
        self._fresh = frozenset(ranks)
        if len(self._fresh) == self._ranks.world_size:
            self._ranks.lost = ()
            self._wants_group, self._backend = False, None  # as after a start: entered at first use or by the user
        self._regroup(events, stops)
        self._fresh = frozenset()

    def _give_up_restart(
        self, ranks: Sequence[int], events: queue.SimpleQueue[Event], stops: InterruptListener
    ) -> NoReturn:
        """End all of `ranks`: a partially started rank would be in no group with the others."""
        for rank in ranks:
            self._ranks.end_process(rank, events)
            self._ranks.standing.dead[rank] = "was to be restarted, and that was stopped"
        self._regroup(events, stops)
        verb, what = ("is", "it") if len(ranks) == 1 else ("are", "them")
        kept = "; the others have kept their variables" if self._ranks.standing.live else ""
        raise LaunchInterrupted(
            f"restarting {render_ranks(ranks)} was stopped: {render_ranks(ranks)} {verb} not running, "
            f"`%ddp restart {' '.join(map(str, ranks))}` starts {what}{kept}"
        ) from None

    def _recover(self, outcome: Outcome, events: queue.SimpleQueue[Event], stops: InterruptListener) -> None:
        reports = [part.report for part in outcome.parts.values() if part.report is not None]
        self._note_device_errors(outcome)
        if (not outcome.was_cut and not outcome.is_uneven) or (
            outcome.spared_group and not self._ranks.standing.device_errors
        ):
            self._wants_group = self._wants_group or any(report.has_group for report in reports)
            if outcome.spared_group and len(reports) == self._ranks.world_size and not _ended_alike(reports):
                self._compare(events, stops)
            return
        freed = outcome.freed.values()
        had_group = any(report.has_group for report in (*reports, *freed))
        self._wants_group = had_group or (self._wants_group and self._is_down)  # else the ranks left it themselves
        self._backend = next((report.value["backend"] for report in freed if report.has_group), self._backend)
        self._unfinished |= {rank for rank, report in outcome.freed.items() if (report.value or {}).get("unfinished")}
        if self._ranks.standing.unusable and self._ranks.options.respawn:
            self._respawn(events, stops)
        else:
            self._regroup(events, stops)

    def _note_device_errors(self, outcome: Outcome) -> None:
        for rank, part in sorted(outcome.parts.items()):
            standing = self._ranks.standing
            text = "" if part.report is None else part.report.device_error
            if text and rank not in standing.dead and rank not in standing.device_errors:
                standing.device_errors[rank] = text
                self._ranks.view.note(describe_device_error(rank, text, self._ranks.options.respawn))

    def _compare(self, events: queue.SimpleQueue[Event], stops: InterruptListener) -> None:
        """Report DDP models that differ between ranks, such as after only some ranks have loaded a checkpoint."""
        live = self._ranks.standing.live
        ids = {rank: self._ask(rank, "compare", {}, live) for rank in live}
        outcome = self._watch(ids, "comparing DDP models", events, stops)
        if outcome.was_cut:
            self._recover(outcome, events, stops)
            return
        for text in describe_differences(list(outcome.values.values())):
            self._ranks.view.note(text)

    def _regroup(self, events: queue.SimpleQueue[Event], stops: InterruptListener) -> None:
        """Take all live ranks out of their group; if a group was in use and every rank is usable, form a new one."""
        self._ranks.generation += 1
        enter = self._wants_group and not self._ranks.standing.unusable and not self._ranks.standing.store_end
        began_s = time.monotonic()
        arguments = {"generation": self._ranks.generation, "enter": enter, "backend": self._backend}
        live = self._ranks.standing.live
        ids = {rank: self._ask(rank, "rebuild", arguments, live) for rank in live}
        outcome = self._watch(ids, "rebuilding the process group", events, stops, patient=True)
        self._note_device_errors(outcome)
        self._is_broken = enter and outcome.was_cut
        self._is_down = not enter or self._is_broken
        if enter:
            self._say_rebuilt(outcome, time.monotonic() - began_s)

    def _blocked(self) -> str:
        """Return the reason why no rank can enter a group now; "" if none."""
        standing = self._ranks.standing
        if standing.store_end:
            return f"{standing.store_end}; {START_OVER}"
        ranks = sorted(standing.dead) or sorted(standing.device_errors)
        if not ranks:
            return ""
        verb, what = ("is", "it") if len(ranks) == 1 else ("are", "them")
        state = f"{verb} dead" if standing.dead else f"cannot use {'its device' if what == 'it' else 'their devices'}"
        return (
            f"{render_ranks(ranks)} {state}; restart {what} "
            f"(`%ddp restart {' '.join(map(str, ranks))}`, `session.restart({ranks[0]})`)"
        )

    def _say_rebuilt(self, outcome: Outcome, duration_s: float) -> None:
        note: Callable[[str], None] = self._ranks.view.note
        values = list(outcome.values.values())
        if outcome.was_cut or not values:
            note("the process group could not be rebuilt; variables are kept, and the next cell tries again")
            return
        self._ranks.lost = tuple(sorted({*self._ranks.lost, *(text for value in values for text in value["lost"])}))
        live, restarted = self._ranks.standing.live, self._fresh
        for text in describe_rebuilt(
            values, duration_s, live=live, restarted=restarted, unfinished=self._unfinished - restarted
        ):
            note(text)
        self._unfinished.clear()


def _ended_alike(reports: Sequence[Report]) -> bool:
    """True if all ranks failed at the same line with the same error, and so have done the same work until then."""
    return len({(report.status, report.type_name, report.message, report.traceback) for report in reports}) == 1


_MAX_LINES = 5


def describe_rebuilt(
    values: Sequence[Mapping[str, Any]],
    duration_s: float,
    *,
    live: Collection[int],
    restarted: Collection[int],
    unfinished: Collection[int] = (),
) -> Iterator[str]:
    """Yield the messages to show after a rebuild, one line each.

    `values`: the reply of each rank; `live`: all live ranks; `restarted`: those of them that lost their variables;
    `unfinished`: ranks on whose devices collectives were aborted with optimizer steps queued behind them.
    """
    rebound = max(value["rebound"] for value in values)
    models = f"; {rebound} DDP model{'s' * (rebound > 1)} bound to it" if rebound else ""
    whose = {*live} - {*restarted}
    kept = f", variables{f' of {render_ranks(whose)}' if restarted else ''} are kept" if whose else ""
    yield f"the process group was freed and rebuilt in {duration_s:.1f} s{kept}{models}"
    lost = sorted({text for value in values for text in value["lost"]})
    if lost:
        yield f"gone with the old group, create again what you still need: {', '.join(lost)}"
    for unbound in sorted({text for value in values for text in value["unbound"]}):
        yield f"not bound to the new group: {unbound}"
    if unfinished:
        yield (
            f"collectives were aborted on the devices of {render_ranks(sorted(unfinished))}: models and optimizers "
            "there may hold an unfinished update; load a checkpoint on all ranks before training on"
        )
    yield from describe_differences(values)


def describe_differences(values: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield messages about DDP models that differ between ranks; none if all are equal. `values` as above."""
    if values and values[0]["disagreements"]:
        yield from _describe_disagreements(values[0]["disagreements"], values[0]["named"])


def _describe_disagreements(plain: Sequence[str], named: Mapping[str, str]) -> Iterator[str]:
    """Yield messages about differing models.

    `plain`: a sentence per parameter; `named`: one per variable that holds a model.
    """
    yield from list(named.values() or plain)[:_MAX_LINES]
    if any("numbers of DDP models" in text or "different models" in text for text in plain):
        yield "run the cells that make the models again, on all ranks, before the next step"
        return
    variable = next((name for name in named if " " not in name), None)
    of_rank_zero = (
        f"`for p in {variable}.parameters(): group.broadcast(p.data)`"
        if variable is not None
        else "`group.broadcast(p.data)` for each parameter `p` of the model"
    )
    yield (
        f"{len(plain)} parameter{'s' * (len(plain) > 1)} would stay apart: load a checkpoint on all ranks, or take "
        f"rank 0's ({of_rank_zero}) and create the optimizer again"
    )
