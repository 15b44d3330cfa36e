# SPDX-License-Identifier: Apache-2.0
"""`Recovery`: restarts ranks and rebuilds the process group after a failure; describes the result."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ddpilot.errors import LaunchInterrupted
from ddpilot.findings.text import render_ranks
from ddpilot.session.execution.execution import Execution
from ddpilot.session.execution.outcome import Outcome
from ddpilot.session.kernels.event_router import Turn
from ddpilot.session.kernels.manager import RankKernels
from ddpilot.session.kernels.states import describe_device_error
from ddpilot.session.protocol.messages import Compare, Rebuild

_MAX_LINES = 5


class Recovery:
    """Brings ranks back to a state in which the next cell can run. Variables are kept except on restarted ranks."""

    def __init__(self, kernels: RankKernels) -> None:
        self._kernels = kernels
        self._wants_group = False
        self._backend: str | None = None
        self._is_broken = False
        """True if rebuilding the group has failed."""
        self._is_down = False
        """True if the ranks have left their group and not entered a new one."""
        self._restarting: frozenset[int] = frozenset()
        self._unfinished: set[int] = set()
        """Ranks on whose devices collectives were aborted since the last rebuild."""

    def prepare(self, turn: Turn) -> None:
        """Before new work: restart unusable ranks if the session respawns, or retry a rebuild that failed."""
        if self._kernels.options.respawn and self._kernels.states.unusable:
            self._respawn(turn)
        elif self._is_broken:
            self._rebuild(turn)
        self._kernels.show_torch_logs()

    def recover(self, outcome: Outcome, turn: Turn) -> None:
        """After a cell or request: rebuild the group if `outcome` left it unusable."""
        reports = [part.report for part in outcome.parts.values() if part.report is not None]
        self._note_device_errors(outcome)
        is_ok = not outcome.was_aborted and not outcome.has_mismatch
        if is_ok or (outcome.is_group_intact and not self._kernels.states.device_errors):
            self._wants_group = self._wants_group or any(report.has_group for report in reports)
            is_complete = len(reports) == self._kernels.world_size
            if outcome.is_group_intact and is_complete and len({report.error for report in reports}) > 1:
                self._compare(turn)  # ranks that failed at the same line have done the same work until then
            return
        freed = outcome.freed.values()
        had_group = any(report.has_group for report in (*reports, *freed))
        self._wants_group = had_group or (self._wants_group and self._is_down)  # else the ranks left it themselves
        self._backend = next((report.value["backend"] for report in freed if report.has_group), self._backend)
        self._unfinished |= {rank for rank, report in outcome.freed.items() if (report.value or {}).get("unfinished")}
        if self._kernels.states.unusable and self._kernels.options.respawn:
            self._respawn(turn)
        else:
            self._rebuild(turn)

    def restart(self, ranks: Sequence[int], turn: Turn) -> None:
        """Restart the processes of `ranks` under the same rank numbers, and rebuild the group if one was in use."""
        self._kernels.processes.prepare_start(f"restarting {render_ranks(ranks)}", ranks)
        try:
            for rank in ranks:
                self._kernels.end_process(rank, turn.events)
            self._kernels.start_processes(ranks, turn.events)
        except KeyboardInterrupt:
            self._cancel_restart(ranks, turn)
        self._restarting = frozenset(ranks)
        if len(self._restarting) == self._kernels.world_size:
            self._kernels.lost = ()
            self._wants_group, self._backend = False, None  # as after a start: entered at first use or by the user
        self._rebuild(turn)
        self._restarting = frozenset()

    def _respawn(self, turn: Turn) -> None:
        ranks = self._kernels.states.unusable
        self.restart(ranks, turn)
        self._kernels.view.note(f"{render_ranks(ranks)} restarted (`respawn`), with no variables")

    def _cancel_restart(self, ranks: Sequence[int], turn: Turn) -> NoReturn:
        """End all of `ranks`: a partially started rank could not join a group with the other ranks."""
        for rank in ranks:
            self._kernels.end_process(rank, turn.events)
            self._kernels.states.dead[rank] = "was not restarted because the restart was interrupted"
        self._rebuild(turn)
        verb, them = ("is", "it") if len(ranks) == 1 else ("are", "them")
        kept = "; the other ranks kept their variables" if self._kernels.states.live else ""
        raise LaunchInterrupted(
            f"restarting {render_ranks(ranks)} was interrupted: {render_ranks(ranks)} {verb} not running, "
            f"`%ddp restart {' '.join(map(str, ranks))}` starts {them}{kept}"
        ) from None

    def _note_device_errors(self, outcome: Outcome) -> None:
        states = self._kernels.states
        for rank, part in sorted(outcome.parts.items()):
            text = "" if part.report is None else part.report.device_error
            if text and rank not in states.dead and rank not in states.device_errors:
                states.device_errors[rank] = text
                self._kernels.view.note(describe_device_error(rank, text, self._kernels.options.respawn))

    def _compare(self, turn: Turn) -> None:
        """Report DDP models that differ between ranks, such as after only some ranks have loaded a checkpoint."""
        ids = self._kernels.request(Compare(), self._kernels.states.live)
        outcome = Execution(ids, self._kernels, turn, name="comparing DDP models").run()
        if outcome.was_aborted:
            self.recover(outcome, turn)
            return
        for text in describe_differences(list(outcome.values.values())):
            self._kernels.view.note(text)

    def _rebuild(self, turn: Turn) -> None:
        """Take all live ranks out of their group; if a group was in use and every rank is usable, form a new one."""
        self._kernels.generation += 1
        states, began_s = self._kernels.states, time.monotonic()
        enter = self._wants_group and not states.unusable and not states.store_end
        request = Rebuild(generation=self._kernels.generation, enter=enter, backend=self._backend)
        ids = self._kernels.request(request, states.live)
        outcome = Execution(ids, self._kernels, turn, name="rebuilding the process group", confirm_interrupt=True).run()
        if not outcome.was_aborted:
            self._kernels.show_torch_logs()
        self._note_device_errors(outcome)
        self._is_broken = enter and outcome.was_aborted
        self._is_down = not enter or self._is_broken
        if enter:
            self._report_rebuild(outcome, time.monotonic() - began_s)

    def _report_rebuild(self, outcome: Outcome, duration_s: float) -> None:
        kernels, values = self._kernels, list(outcome.values.values())
        if outcome.was_aborted or not values:
            kernels.view.note(
                "the process group could not be rebuilt; variables are kept, and the next cell tries again"
            )
            return
        kernels.lost = tuple(sorted({*kernels.lost, *(text for value in values for text in value["lost"])}))
        for text in describe_rebuilt(
            values,
            duration_s,
            live=kernels.states.live,
            restarted=self._restarting,
            unfinished=self._unfinished - self._restarting,
        ):
            kernels.view.note(text)
        self._unfinished.clear()


def describe_rebuilt(
    values: Sequence[Mapping[str, Any]],
    duration_s: float,
    *,
    live: Collection[int],
    restarted: Collection[int],
    unfinished: Collection[int] = (),
) -> Iterator[str]:
    """Yield the messages to show after a rebuild, one line each.

    `values`: the reply of each rank; `live`: all live ranks; `restarted`: live ranks that lost their variables;
    `unfinished`: ranks on whose devices collectives were aborted with optimizer steps queued behind them.
    """
    rebound = max(value["rebound"] for value in values)
    models = f"; {rebound} DDP model{'s' * (rebound > 1)} bound to it" if rebound else ""
    unchanged = {*live} - {*restarted}
    kept = f", variables{f' of {render_ranks(unchanged)}' if restarted else ''} are kept" if unchanged else ""
    yield f"the process group was freed and rebuilt in {duration_s:.1f} s{kept}{models}"
    lost = sorted({text for value in values for text in value["lost"]})
    if lost:
        yield f"lost with the old group; create again what you still need: {', '.join(lost)}"
    for unbound in sorted({text for value in values for text in value["unbound"]}):
        yield f"not bound to the new group: {unbound}"
    if unfinished:
        yield (
            f"collectives were aborted on the devices of {render_ranks(sorted(unfinished))}: models and optimizers "
            "there may hold an unfinished update; load a checkpoint on all ranks before training on"
        )
    yield from describe_differences(values)


def describe_differences(values: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield messages about DDP models that differ between ranks.

    `values`: the reply of each rank, with "disagreements", a sentence per parameter, and "named", a sentence per
    variable that holds a model. They are the same on all ranks.
    """
    plain, named = (values[0]["disagreements"], values[0]["named"]) if values else ((), {})
    if not plain:
        return
    yield from list(named.values() or plain)[:_MAX_LINES]
    if any("numbers of DDP models" in text or "different models" in text for text in plain):
        yield "run the cells that create the models again, on all ranks, before the next step"
        return
    variable = next((name for name in named if " " not in name), None)
    of_rank_zero = (
        f"`for p in {variable}.parameters(): group.broadcast(p.data)`"
        if variable is not None
        else "`group.broadcast(p.data)` for each parameter `p` of the model"
    )
    yield (
        f"{len(plain)} parameter{'s' * (len(plain) > 1)} would continue to differ: load a checkpoint on all ranks, or "
        f"broadcast rank 0's ({of_rank_zero}) and create the optimizer again"
    )
