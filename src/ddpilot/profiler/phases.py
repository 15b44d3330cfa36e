# SPDX-License-Identifier: Apache-2.0
"""Divide the time of each update among phases, on all ranks, and find which rank the others wait for. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ddpilot.profiler.spans_file import PHASES, SPAN, RankTimes

COMMUNICATION = PHASES.index("communication")
SHARES = (*PHASES[:COMMUNICATION], "waiting", *PHASES[COMMUNICATION:], "other")
"""What an update consists of: the phases, where the time in a collective until the last rank has come to it is
"waiting", and "other" for the rest."""
NUM_WARM_UP = 3
"""First updates that are left out: they build DDP's buckets, start workers and fill caches."""
_NUM_LEAST = 3
"""Ends of updates that are needed for at least two updates to measure."""
Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds of each update in each of `SHARES`, by rank: arrays [ranks, updates, shares]."""

    ranks: tuple[int, ...]
    seconds: Array
    arrivals_s: Array
    """Time at which each rank came to the last collective of each update, after the first rank to come: [ranks,
    updates]; NaN where an update has none."""
    num_samples: Array
    """Samples of each update: [ranks, updates]; 0 where the program uses no DataLoader."""
    first_update: int
    """Number of the first update, from 1: those before are left out."""
    by_site: dict[tuple[int, int], float]
    """Seconds of an update in collectives and checkpoints, by phase and number of the user's line, on rank 0."""

    @property
    def durations_s(self) -> Array:
        """Seconds of each update: [ranks, updates]."""
        return numpy.asarray(self.seconds.sum(axis=2))

    def share(self, name: str) -> Array:
        """Return seconds of each update in one of `SHARES`: [ranks, updates]."""
        return numpy.asarray(self.seconds[:, :, SHARES.index(name)])

    def median(self, name: str) -> float:
        """Return the median over updates of the mean over ranks of one of `SHARES`, in seconds."""
        return float(numpy.median(self.share(name).mean(axis=0)))

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks in a second; 0.0 where none were counted."""
        return float(self.num_samples.sum() / self.durations_s.mean(axis=0).sum())

    @property
    def update_s(self) -> float:
        """Median duration of an update, in seconds."""
        return float(numpy.median(self.durations_s.mean(axis=0)))


def divide_updates(times: Sequence[RankTimes]) -> Phases | None:
    """Return the phases of the updates that all ranks have recorded; None if there are too few."""
    ends_ns = [each.updates["end_ns"] for each in times]
    num = min(map(len, ends_ns), default=0)
    skipped = _count_skipped(times)
    if num - skipped < _NUM_LEAST:
        return None
    seconds = numpy.zeros((len(times), num - skipped - 1, len(SHARES)))
    parts = [_divide_spans(each.spans, ends[skipped:num]) for each, ends in zip(times, ends_ns, strict=True)]
    clocks = {each.facts.get("clock") for each in times}
    can_match = len(clocks) == 1 and not any(each.facts.get("has_subgroups") for each in times)
    arrivals = numpy.full(seconds.shape[:2], numpy.nan)
    for update in range(seconds.shape[1]):
        own = [rank_parts[update] for rank_parts in parts]
        waits, begins = _waits(own) if can_match else _no_waits(own)
        for rank, spans in enumerate(own):
            begin_ns, end_ns = (ends_ns[rank][skipped + update + offset] for offset in (0, 1))
            seconds[rank, update] = _sum_phases(spans, begin_ns, end_ns, waits[rank])
            arrivals[rank, update] = begins[rank]
    arrivals -= numpy.nanmin(arrivals, axis=0, initial=numpy.inf, where=~numpy.isnan(arrivals))
    return Phases(
        ranks=tuple(each.rank for each in times),
        seconds=seconds,
        arrivals_s=arrivals,
        num_samples=numpy.array([each.updates["num_samples"][skipped + 1 : num] for each in times]),
        first_update=skipped + 2,
        by_site=_sum_sites(parts[0]),
    )


def _count_skipped(times: Sequence[RankTimes]) -> int:
    """Return how many first updates are left out: to warm up, and those that torch.profiler recorded."""
    recorded = [numpy.flatnonzero(each.updates["num_samples"] < 0) for each in times]
    last = max((int(each[-1]) + 1 for each in recorded if len(each)), default=0)
    return max(NUM_WARM_UP, last)


def _divide_spans(spans: Array, ends_ns: Array) -> list[Array]:
    """Return the spans in each update between two of `ends_ns`, outer ones first, cut at its begin and end."""
    spans = spans[numpy.argsort(spans["end_ns"], kind="stable")]
    firsts = numpy.searchsorted(spans["end_ns"], ends_ns[:-1], side="right")
    # The earliest begin of each span and those after it: a span may begin before one that has ended earlier.
    begins_ns = numpy.minimum.accumulate(spans["begin_ns"][::-1])[::-1]
    lasts = numpy.searchsorted(begins_ns, ends_ns[1:], side="left")
    found = []
    for begin_ns, end_ns, first, last in zip(ends_ns[:-1], ends_ns[1:], firsts, lasts, strict=True):
        inside = spans[first:last]
        inside = inside[inside["begin_ns"] < end_ns]
        inside["begin_ns"] = numpy.maximum(inside["begin_ns"], begin_ns)
        inside["end_ns"] = numpy.minimum(inside["end_ns"], end_ns)
        found.append(numpy.asarray(inside[numpy.lexsort((-inside["end_ns"], inside["begin_ns"]))]))
    return found


def _own_times(spans: Array) -> Array:
    """Return the time of each span without the spans inside it, in ns. `spans`: outer ones first."""
    own = (spans["end_ns"] - spans["begin_ns"]).copy()
    around: list[int] = []
    for place in range(len(spans)):
        while around and spans["end_ns"][around[-1]] <= spans["begin_ns"][place]:
            around.pop()
        if around:
            own[around[-1]] -= spans["end_ns"][place] - spans["begin_ns"][place]
        around.append(place)
    return numpy.asarray(own)


def _sum_phases(spans: Array, begin_ns: int, end_ns: int, waiting_s: float) -> Array:
    own_s = _own_times(spans) / 1e9
    by_phase = numpy.bincount(spans["phase"], weights=own_s, minlength=len(PHASES))
    waiting_s = min(waiting_s, by_phase[COMMUNICATION])
    by_phase[COMMUNICATION] -= waiting_s
    rest = (end_ns - begin_ns) / 1e9 - by_phase.sum() - waiting_s
    return numpy.concatenate([by_phase[:COMMUNICATION], [waiting_s], by_phase[COMMUNICATION:], [rest]])


def _waits(by_rank: Sequence[Array]) -> tuple[list[float], list[float]]:
    """Return for each rank how long it waited in the collectives of one update, and when it came to the last of them.

    Collectives are matched by their order. Nothing is known of waits if the ranks have different numbers of them.
    """
    calls = [spans[spans["phase"] == COMMUNICATION] for spans in by_rank]
    if len({len(each) for each in calls}) > 1 or not len(calls[0]):
        return _no_waits(by_rank)
    last_ns = numpy.max([each["begin_ns"] for each in calls], axis=0)
    waits = [
        float(numpy.clip(numpy.minimum(last_ns, each["end_ns"]) - each["begin_ns"], 0, None).sum()) / 1e9
        for each in calls
    ]
    return waits, [float(each["begin_ns"][-1]) / 1e9 for each in calls]


def _no_waits(by_rank: Sequence[Array]) -> tuple[list[float], list[float]]:
    return [0.0] * len(by_rank), [float("nan")] * len(by_rank)


def _sum_sites(updates: Sequence[Array]) -> dict[tuple[int, int], float]:
    spans = numpy.concatenate(updates) if updates else numpy.zeros(0, SPAN)
    found: dict[tuple[int, int], float] = {}
    for span in spans[spans["site"] >= 0]:
        key = (int(span["phase"]), int(span["site"]))
        found[key] = found.get(key, 0.0) + float(span["end_ns"] - span["begin_ns"]) / 1e9 / len(updates)
    return found
