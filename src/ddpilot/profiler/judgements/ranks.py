# SPDX-License-Identifier: Apache-2.0
"""Judge differences between ranks: one that the others wait for, and batches with unequal contents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy

from ddpilot.profiler.judgements.judged import SMALL_SHARE, Judged, judged, longest_core_wait_s, longest_line, ms
from ddpilot.profiler.phases import Phases

LATE_UPDATES = 0.7
"""Share of the updates in which a straggler is late, at least."""
_EXPLAINED = 0.5
"""Part of a rank's lateness that the longest of its phases must explain; the rest is noise of the machine."""
_SIMILAR = 0.25
"""Ranks whose times for an element differ by less are equally fast."""
_LEAST_CORRELATION = 0.7
_COMPUTE = ("forward", "backward")
COMPUTE = "forward and backward"
_BOTH = 0.2
"""Both passes are longer on a rank if the one has this part of the excess of the other."""
OWN_WORK = ("data", "copy", "forward", "backward", "optimizer", "checkpoint", "evaluation", "sync", "other")
_WORDS = {
    "data": "loading data",
    "copy": "copying data to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
    "checkpoint": "writing a checkpoint",
    "evaluation": "forward passes without gradients",
    "sync": "reading values of tensors",
    "other": "code between these phases",
    COMPUTE: "the forward and the backward pass",
}
_DEVICE = "Compare the ranks' devices with `ddpilot doctor`: throttling, other processes, shared cores"
_FIXES = {
    "data": "Compare the ranks' files and their number of workers, and give every rank samples of the same size",
    "forward": _DEVICE,
    "backward": _DEVICE,
    COMPUTE: _DEVICE,
    "checkpoint": "Write checkpoints in the background, as `Loop(checkpoint_dir=...)` does",
    "evaluation": "Divide the evaluation among all ranks, as `loop.evaluate` does",
    "other": "Find what this rank alone does between its updates: logging, pictures, files",
}


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    place: int
    share: float
    """Share of the updates in which it is the last."""
    late_s: float
    """Median of how much later than the median of the other ranks it comes to the last collective of an update."""
    phase: str
    """Phase in which it is longer than the others."""


def judge_ranks(phases: Phases) -> Iterator[Judged]:
    """Judge a straggler, batches of unequal contents, or numbers of batches that are unequal."""
    yield from _judge_shadows(phases)
    found = find_straggler(phases)
    uneven = None if found is not None and found.phase not in (COMPUTE, *_COMPUTE) else _judge_contents(phases, found)
    if uneven is not None:
        yield uneven
    elif found is not None and found.phase != "checkpoint":  # that is judged by its line
        yield _judge_straggler(phases, found)


def find_straggler(phases: Phases) -> Straggler | None:
    """Return the rank that the others wait for.

    None if no rank is late in most updates by at least 5 % of an update and by what any rank waits for a core, or if no
    phase of it explains that.
    """
    known = ~numpy.isnan(phases.arrivals_s).any(axis=0)
    if len(phases.ranks) < 2 or not known.any():
        return None
    arrivals = phases.arrivals_s[:, known]
    last = arrivals.argmax(axis=0)
    place = int(numpy.bincount(last, minlength=len(phases.ranks)).argmax())
    late = arrivals[place] - numpy.median(numpy.delete(arrivals, place, axis=0), axis=0)
    late_s = float(numpy.median(late))
    is_often = float(numpy.quantile(late, 1 - LATE_UPDATES)) >= SMALL_SHARE * phases.update_s
    if not is_often or late_s < max(longest_core_wait_s(phases), phases.clock_error_s):
        return None
    excess = {name: _excess(phases, name, place) for name in OWN_WORK}
    if min(excess[each] for each in _COMPUTE) > _BOTH * max(excess[each] for each in _COMPUTE):
        excess[COMPUTE] = sum(excess.pop(each) for each in _COMPUTE)
    name = max(excess, key=lambda each: excess[each])
    share = float(numpy.mean(last == place))
    return Straggler(place, share, late_s, name) if excess[name] > _EXPLAINED * late_s else None


def _excess(phases: Phases, name: str, place: int) -> float:
    """Return how much longer than the others a rank is in a phase, in seconds of an update."""
    names = _COMPUTE if name == COMPUTE else (name,)
    seconds = sum(numpy.mean(phases.share(each), axis=1) for each in names)  # it may be long in a few updates only
    return float(seconds[place] - numpy.median(numpy.delete(seconds, place)))


def _judge_straggler(phases: Phases, found: Straggler) -> Judged:
    rank = phases.ranks[found.place]
    others = numpy.delete(phases.share("waiting"), found.place, axis=0)
    waiting_s = float(numpy.median(others.mean(axis=0)))
    longer = _excess(phases, found.phase, found.place)
    evidence = [
        f"the other ranks wait {ms(waiting_s)} of {ms(phases.update_s)} in an update",
        f"{_WORDS[found.phase]} takes {ms(longer)} longer on rank {rank}",
    ]
    if found.phase in (COMPUTE, *_COMPUTE) and _have_equal_contents(phases):
        evidence.append("its batches have as many elements as those of the others: the rank itself is slower")
    return judged(
        "DDP722",
        f"rank {rank} is last in {found.share:.0%} of updates, by {ms(found.late_s)}, in {_WORDS[found.phase]}",
        saved_s=waiting_s,
        total_s=phases.update_s,
        ranks=(rank,),
        line=longest_line(phases, "forward" if found.phase == COMPUTE else found.phase, found.place),
        evidence=tuple(evidence),
        fix=_FIXES.get(found.phase, ""),
    )


def _judge_shadows(phases: Phases) -> Iterator[Judged]:
    """Judge ranks that run out of batches before others, and then only match their collectives."""
    seconds = phases.share("shadow")
    saved_s = float(seconds.mean())
    if saved_s < SMALL_SHARE * phases.mean_s:
        return
    total_s = phases.durations_s.sum(axis=1)
    early = numpy.flatnonzero(seconds.sum(axis=1) >= SMALL_SHARE * total_s)
    place = int(seconds.sum(axis=1).argmax())
    share, num = seconds[place].sum() / total_s[place], seconds.shape[1]
    num_own = num - int((seconds[place] > 0).sum())
    yield judged(
        "DDP754",
        f"rank {phases.ranks[place]} runs out of batches before the others: for {share:.0%} of the time it only "
        "matches their collectives",
        saved_s=saved_s,
        total_s=phases.mean_s,
        ranks=tuple(phases.ranks[each] for each in early),
        evidence=(
            f"it has batches in {num_own} of {num} updates",
            f"the ranks do so for {ms(saved_s)} of {ms(phases.mean_s)} in an update, on average over all",
        ),
    )


def _have_equal_contents(phases: Phases) -> bool:
    """Return True if the ranks' batches have as many elements, on average."""
    means = phases.counts["num_elements"].mean(axis=1) if phases.counts.size else numpy.zeros(1)
    return bool(means.min() > (1 - SMALL_SHARE) * means.max())


def _judge_contents(phases: Phases, found: Straggler | None) -> Judged | None:
    """Judge whether ranks wait for each other because their batches have unequal numbers of elements."""
    if len(phases.ranks) < 2 or not phases.counts.size:
        return None
    elements = phases.counts["num_elements"].astype(float)
    compute = phases.share("forward") + phases.share("backward")
    uneven, most = elements - elements.mean(axis=0), elements.max(axis=0)
    if not elements.all() or float(numpy.median((most - elements.min(axis=0)) / most)) < _SIMILAR:
        return None
    compute = compute - phases.counts["core_wait_ns"] / 1e9  # other processes make them longer, too
    longer = compute - compute.mean(axis=0)
    if not longer.any() or numpy.corrcoef(uneven.ravel(), longer.ravel())[0, 1] < _LEAST_CORRELATION:
        return None
    slope = float((uneven * longer).sum() / (uneven**2).sum())  # seconds of an element
    saved_s = min(float((uneven.max(axis=0) * slope).mean()), float(phases.share("waiting").mean(axis=0).mean()))
    if saved_s < SMALL_SHARE * phases.mean_s:
        return None
    means = elements.mean(axis=1)
    place = found.place if found is not None else int(means.argmax())
    is_one = found is not None and means[place] > (1 + _SIMILAR) * numpy.median(numpy.delete(means, place))
    if found is not None and not is_one:
        return None
    rank = phases.ranks[place]
    words = f"rank {rank}'s batches have" if is_one else "in an update the largest batch of a rank has"
    ratio = means[place] / numpy.delete(means, place).mean() if is_one else float((most / elements.mean(axis=0)).mean())
    return judged(
        "DDP748",
        f"{words} {ratio:.2g} times as many elements as {'those of the others' if is_one else 'the mean'}, and take "
        "longer by that",
        saved_s=saved_s,
        total_s=phases.mean_s,
        ranks=(rank,) if is_one else (),
        line=longest_line(phases, "data", place),
        evidence=(
            f"ranks wait {ms(float(phases.share('waiting').mean()))} of {ms(phases.mean_s)} in an update",
            f"a thousand elements more take {ms(1000 * slope)} longer in forward and backward",
        ),
    )
