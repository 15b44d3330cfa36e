# SPDX-License-Identifier: Apache-2.0
"""Build the finding for ranks that diverge, with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.rules.parameters import causes
from ddpilot.guard.rules.parameters.causes import Cause
from ddpilot.guard.rules.rule import place_of

if TYPE_CHECKING:
    from ddpilot.guard.rules.parameters.comparison import Comparison
    from ddpilot.guard.rules.parameters.steps import Moment
    from ddpilot.guard.rules.parameters.steps_taken import Skipped

_EVENTS = {"F": "forward", "f": "forward in no_sync", "B": "backward", "b": "backward in no_sync", "R": "backward"}
_MAX_NAMED = 3


def tell_divergence(
    cause: Cause,
    comparison: Comparison,
    first: Moment,
    proof: Moment,
    *,
    skipped: Skipped | None = None,
    may_be_meant: bool = False,
) -> Finding:
    """Build the finding for `cause`: gradients or steps first differed at `first`, parameters at `proof`.

    `skipped`: the step that some ranks did not take, if that is the cause.
    """
    loaded = tuple(sorted(comparison.loads)) if cause is causes.PARAMETERS else ()
    if len(loaded) == len(first.steps):
        loaded = ()
    left_out = skipped.ranks if skipped is not None else ()
    ranks = left_out or loaded or proof.difference.ranks or first.difference.ranks or tuple(sorted(first.steps))
    return make_finding(
        cause.code,
        severity="warning" if may_be_meant else None,
        summary=_summary(first, proof, skipped),
        ranks=tuple(ranks),
        line=place_of(_site(cause, comparison, first, proof)),
        evidence=tuple(_evidence(cause, comparison, first, proof)),
        why=cause.why,
        fix=cause.fix,
    )


def tell_order(first: int, names: list[Any], second: int, values: Mapping[str, Any]) -> Finding:
    """Build the finding for parameters wrapped in a different order on two ranks; `values`: as noted by `second`."""
    at = next(at for at, (one, other) in enumerate(zip(names, values["names"], strict=True)) if one != other)
    return make_finding(
        "DDP327",
        summary=f"the model's parameters stand in another order on rank {second} than on rank {first}",
        ranks=(first, second),
        line=place_of(values["site"]),
        evidence=tuple(
            f"parameter {at}: rank {rank} {each[at][0]} {each[at][1]}"
            for rank, each in ((first, names), (second, values["names"]))
        ),
        why="DDP matches parameters by their number, not by their name: gradients of different layers are averaged",
        fix="Create layers in the same order on every rank: from a list or a sorted one, never from a set",
    )


def _summary(first: Moment, proof: Moment, skipped: Skipped | None) -> str:
    if skipped is not None:
        others, ranks = render_ranks(skipped.taken_by), render_ranks(skipped.ranks)
        return f"step {skipped.number}: {others} called optimizer.step(), {ranks} did not"
    if first.difference.gradients:
        return f"gradients differ between ranks at step {first.number}" + (
            f", parameters at step {proof.number}" if proof.difference.parameters else ""
        )
    what = f"parameters differ between ranks before step {proof.number}"
    return f"{what}, gradients do not" if first.is_seen else f"{what}, the last"


def _evidence(cause: Cause, comparison: Comparison, first: Moment, proof: Moment) -> list[str]:
    lines = []
    if first.difference.gradients:
        lines += _name_some("gradient of", first.difference.gradients, first)
    if proof.difference.parameters:
        lines += _name_some("parameter", proof.difference.parameters, proof)
    if cause is causes.NO_SYNC:
        sites = {str(place_of(step.values["at"])) for step in first.steps.values() if step.values.get("at")}
        lines += [f"no_sync() at {site}" for site in sorted(sites)]
    events = {rank: events for rank in sorted(first.steps) if (events := first.value(rank, "e"))}
    if events:
        lines += _say_events(events)
    unit = next(iter(comparison.units.values()))
    if cause is causes.MOVED:
        lines += unit["moved"][:_MAX_NAMED]
    if unit["made"]:
        lines.append(f"wrapped in DDP at {place_of(unit['made'])}")
    for rank, entry in sorted(comparison.loads.items()):
        if cause is causes.PARAMETERS:
            what = "changed parameters by apply" if entry.values.get("by") == "apply" else "loaded a state dict"
            lines.append(f"rank {rank} {what} at {place_of(entry.values['site'])}")
    if cause is causes.RATES:
        shown = list(first.rates.items())[:8]
        lines += [f"rank {rank}: lr {', '.join(f'{rate:g}' for rate in rates)}" for rank, rates in shown]
    if cause is causes.EPOCHS:
        begun = sorted(comparison.passes.find_uneven(comparison.alike_at).items())[:8]
        lines.append("an epoch began after " + ", ".join(f"{number} steps on rank {rank}" for rank, number in begun))
    if cause in (causes.CHANGED, causes.CHANGED_AT_END):
        lines.append(f"parameters were the same on all ranks before step {comparison.alike_at}")
    lines.append(f"optimizer steps at {place_of(unit['site'])}")
    return lines


def _name_some(what: str, lines: Mapping[str, str], moment: Moment) -> list[str]:
    named = [f"step {moment.number}: {what} {name}: {line}" for name, line in list(lines.items())[:_MAX_NAMED]]
    rest = len(lines) - _MAX_NAMED
    return [*named, f"and {rest} more"] if rest > 0 else named


def _say_events(events: Mapping[int, str]) -> list[str]:
    alike: dict[str, list[int]] = {}
    for rank, text in events.items():
        alike.setdefault(text, []).append(rank)
    return [
        f"before it, {render_ranks(ranks)}: {', '.join(_EVENTS[event] for event in text[-8:])}"
        for text, ranks in alike.items()
    ]


def _site(cause: Cause, comparison: Comparison, first: Moment, proof: Moment) -> Any:
    unit = next(iter(comparison.units.values()))
    if cause is causes.PARAMETERS:
        loads = [entry.values["site"] for _, entry in sorted(comparison.loads.items())]
        return (loads[0] if loads else unit["made"]) or unit["site"]
    if cause in causes.LOCAL.values():
        # The line of a call that bypasses DDP may be known only from the second call on.
        steps = [step for moment in (proof, first) for _, step in sorted(moment.steps.items())]
        known = {step.values.get("why") for step in first.steps.values()} - {None}
        guilty = next((step.values for step in steps if step.values.get("why") in known), {})
        return (guilty.get("site" if guilty.get("why") == "no_sync" else "at")) or unit["site"]
    if cause is causes.DROPPED:
        return next((unit["dropped"] for unit in comparison.units.values() if unit.get("dropped")), unit["site"])
    if cause in (causes.LATE, causes.MOVED):
        return unit["made"] or unit["site"]
    return unit["site"]
