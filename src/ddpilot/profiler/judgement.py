# SPDX-License-Identifier: Apache-2.0
"""Judge where the time of updates goes: findings with what each would give, the largest first. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.profiler.phases import COMMUNICATION, Phases
from ddpilot.profiler.spans_file import PHASES, RankTimes
from ddpilot.user_files import CodeLine

_LATE_UPDATES = 0.6
_LATE_SHARE = 0.05
_EXPLAINED = 0.5
"""Part of a rank's lateness that the longest of its phases must explain; the rest is noise of the machine."""
_DATA_SHARE = 0.10
_COMMUNICATION_SHARE = 0.30
"""Exposed communication above this share of an update is too much; 10:1 of computation to communication is good."""
_SMALL_SHARE = 0.05
_OWN_WORK = ("data", "copy", "forward", "backward", "optimizer", "checkpoint", "evaluation", "other")
_WORDS = {
    "data": "loading data",
    "copy": "copying data to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
    "checkpoint": "writing a checkpoint",
    "evaluation": "forward passes without gradients",
    "other": "code between these phases",
}


_LENGTHS = "Divide samples by their length, as `shares=` and bucketed batches do; `ddpilot doctor` compares devices"
_FIXES = {
    "data": "Compare the ranks' files and their number of workers, and give every rank samples of the same size",
    "forward": _LENGTHS,
    "backward": _LENGTHS,
    "checkpoint": "Write checkpoints in the background, as `Loop(checkpoint_dir=...)` does",
    "evaluation": "Divide the evaluation among all ranks, as `loop.evaluate` does",
    "other": "Find what this rank alone does between its updates: logging, pictures, files",
}


@dataclass(frozen=True)
class Judged:
    """A finding, and the factor by which updates would be faster without its cause."""

    finding: Finding
    factor: float


def judge(phases: Phases, times: Sequence[RankTimes]) -> tuple[Judged, ...]:
    """Return what makes updates slow, sorted by what its end would give."""
    found = [
        *_judge_straggler(phases),
        *_judge_data(phases, times),
        *_judge_communication(phases, times),
        *_judge_lines(phases, times),
        *_judge_threads(times),
    ]
    return tuple(sorted(found, key=lambda each: -each.factor))


def find_straggler(phases: Phases) -> tuple[int, float, float, str] | None:
    """Return the rank that the others wait for: its place, share of updates, lateness in seconds, and in which phase.

    Lateness is the median of how much later than the median of the other ranks it comes to the last collective of an
    update. None if no rank is late in most updates, by at least 5 % of an update, or no phase of it explains that.
    """
    known = ~numpy.isnan(phases.arrivals_s).any(axis=0)
    if len(phases.ranks) < 2 or not known.any():
        return None
    arrivals = phases.arrivals_s[:, known]
    last = arrivals.argmax(axis=0)
    counts = numpy.bincount(last, minlength=len(phases.ranks))
    rank = int(counts.argmax())
    others = numpy.delete(arrivals, rank, axis=0)
    late_s = float(numpy.median(arrivals[rank] - numpy.median(others, axis=0)))
    if counts[rank] < _LATE_UPDATES * len(last) or late_s < _LATE_SHARE * phases.update_s:
        return None
    excess = {name: _excess(phases, name, rank) for name in _OWN_WORK}
    name = max(excess, key=lambda each: excess[each])
    return (rank, counts[rank] / len(last), late_s, name) if excess[name] > _EXPLAINED * late_s else None


def _excess(phases: Phases, name: str, rank: int) -> float:
    """Return how much longer than the others `rank` is in a phase, in seconds of an update."""
    seconds = numpy.mean(phases.share(name), axis=1)  # a phase may be long in a few updates only
    return float(seconds[rank] - numpy.median(numpy.delete(seconds, rank)))


def _judge_straggler(phases: Phases) -> Iterator[Judged]:
    found = find_straggler(phases)
    if found is None:
        return
    place, share, late_s, name = found
    rank = phases.ranks[place]
    others = numpy.delete(phases.share("waiting"), place, axis=0)
    waiting_s = float(numpy.median(others.mean(axis=0)))
    longer = _excess(phases, name, place)
    finding = make_finding(
        "DDP722",
        summary=f"rank {rank} is last in {share:.0%} of updates, by {_ms(late_s)}, in {_WORDS[name]}",
        ranks=(rank,),
        evidence=(
            f"the other ranks wait {_ms(waiting_s)} of {_ms(phases.update_s)} in an update",
            f"{_WORDS[name]} takes {_ms(longer)} longer on rank {rank}",
        ),
        fix=_FIXES.get(name, ""),
    )
    yield _judged(finding, phases, waiting_s)


def _judge_data(phases: Phases, times: Sequence[RankTimes]) -> Iterator[Judged]:
    seconds = phases.share("data").mean(axis=1)
    least_s = float(seconds.min())
    if least_s < _DATA_SHARE * phases.update_s:
        return
    num_workers = times[0].facts.get("num_workers")
    workers = "" if num_workers is None else f"; the loader has {num_workers} workers on each rank"
    fix = "Set `num_workers=`, so that batches are loaded while the model computes" if not num_workers else ""
    finding = make_finding(
        "DDP721",
        summary=f"every rank waits {_ms(least_s)} of {_ms(phases.update_s)} in an update for its DataLoader{workers}",
        evidence=[f"rank {rank}: {_ms(each)}" for rank, each in zip(phases.ranks, seconds, strict=True)],
        fix=fix,
    )
    yield _judged(finding, phases, least_s)


def _judge_communication(phases: Phases, times: Sequence[RankTimes]) -> Iterator[Judged]:
    called_s = sum(seconds for (phase, _), seconds in phases.by_site.items() if phase == COMMUNICATION)
    exposed_s = max(0.0, phases.median("communication") - called_s)
    if len(phases.ranks) < 2 or exposed_s < _COMMUNICATION_SHARE * phases.update_s:
        return
    compute_s = sum(phases.median(name) for name in ("forward", "backward", "optimizer"))
    ddp = times[0].facts.get("ddp")
    size = [f"{ddp['parameter_bytes'] / 1e6:.3g} MB of gradients over {ddp['backend']}"] if ddp else []
    finding = make_finding(
        "DDP723",
        summary=f"an update waits {_ms(exposed_s)} of {_ms(phases.update_s)} for gradients to be exchanged",
        evidence=(*size, f"computation takes {_ms(compute_s)}: {compute_s / exposed_s:.1f} to 1; 10 to 1 is good"),
    )
    yield _judged(finding, phases, exposed_s)


_OF_LINES = {"communication": "DDP724", "checkpoint": "DDP725"}


def _judge_lines(phases: Phases, times: Sequence[RankTimes]) -> Iterator[Judged]:
    """Judge what one line of the user takes: collectives of the program itself, and checkpoints."""
    for (phase, site), seconds in phases.by_site.items():
        code = _OF_LINES.get(PHASES[phase])
        line: CodeLine | None = times[0].sites.get(site)
        if code is None or seconds < _SMALL_SHARE * phases.update_s:
            continue
        finding = make_finding(
            code, summary=f"a line takes {_ms(seconds)} of {_ms(phases.update_s)} in an update", line=line
        )
        yield _judged(finding, phases, seconds)


def _judge_threads(times: Sequence[RankTimes]) -> Iterator[Judged]:
    facts = times[0].facts
    num_threads = sum(each.facts.get("num_threads", 0) for each in times[: facts.get("local_world_size", 1)])
    num_cores = facts.get("num_cores", 0)
    if facts.get("uses_device") or not num_cores or num_threads <= num_cores or len(times) < 2:
        return
    summary = f"{num_threads} threads of {facts.get('local_world_size')} ranks share {num_cores} cores"
    yield Judged(make_finding("DDP804", summary=summary), 1.0)


def _judged(finding: Finding, phases: Phases, saved_s: float) -> Judged:
    factor = phases.update_s / max(phases.update_s - saved_s, 0.05 * phases.update_s)
    more = f"without it an update takes about {_ms(phases.update_s - saved_s)}: {factor:.2f}x as fast"
    values = {**finding.to_dict(), "evidence": [*finding.evidence, more]}
    return Judged(Finding.from_dict(values), factor)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
