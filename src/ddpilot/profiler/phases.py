# SPDX-License-Identifier: Apache-2.0
"""Divide the time of each update among phases, on all ranks, and find which rank the others wait for. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from ddpilot.profiler.clocks import align_clocks, clock_error_s
from ddpilot.profiler.spans_file import COUNTS, HOST_CLOCK, PHASES, RankTimes
from ddpilot.user_files import CodeLine

_BACKWARD, COMMUNICATION = PHASES.index("backward"), PHASES.index("communication")
SHARES = (*PHASES[:COMMUNICATION], "waiting", *PHASES[COMMUNICATION:], "other")
"""What an update consists of: the phases, where the time in a collective until the last rank has come to it is
"waiting", and "other" for the rest."""
OTHER = len(PHASES)
"""Number of spans that count as "other": a closure inside an optimizer's step."""
NUM_WARM_UP = 3
"""First updates that are left out: they build DDP's buckets, start workers and fill caches."""
_NUM_LEAST = 3
"""Ends of updates that are needed for at least two updates to measure."""
_LONG_FACTOR, _LONG_S = 4.0, 0.2
"""A first update that is longer than the later ones by this factor, and by these seconds, still compiles or warms up;
unless updates of the last two thirds are as long, too."""
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
    clock: str = HOST_CLOCK
    """Clock of the times: `HOST_CLOCK`, or the type of a device."""
    clock_error_s: float = 0.0
    """How far the clocks of two ranks can be off: what is shorter is not taken for waiting. 0.0 on one node."""
    by_site: dict[tuple[int, int], float]
    """Mean seconds of an update on rank 0, without waiting, by phase and number of the user's line."""
    by_line: tuple[dict[tuple[str, CodeLine], float], ...] = ()
    """The same for each rank, by name of the phase and line."""
    are_together: bool = True
    """False if ranks exchange gradients at different times in updates of the same number: they do not correspond."""
    counts: Array = field(default_factory=lambda: numpy.zeros((0, 0), COUNTS))
    """Counts of each update, of type `COUNTS`: [ranks, updates]; zeros where none were recorded."""

    overlaps: Array = field(default_factory=lambda: numpy.zeros((0, 0, 2)))
    """Seconds in which buckets were exchanged while backward computed, which are no share of an update since they run
    at the same time, and seconds in which they could be: [ranks, updates, 2]; NaN in updates whose buckets were not
    timed."""

    @property
    def overlapped_s(self) -> Array | None:
        """Mean seconds of an update in which buckets were exchanged while backward computed: [ranks].

        None if it is not known: on one rank, or if no bucket was timed on some rank.
        """
        return self._mean_overlap(0) if len(self.ranks) > 1 else None

    def _mean_overlap(self, place: int) -> Array | None:
        known = ~numpy.isnan(self.overlaps[:, :, place])
        if not known.size or not known.any(axis=1).all():
            return None
        return numpy.asarray(numpy.nanmean(self.overlaps[:, :, place], axis=1))

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
    def mean_s(self) -> float:
        """Mean duration of an update, in seconds: with what happens in some updates only."""
        return float(self.durations_s.mean())

    @property
    def update_s(self) -> float:
        """Median duration of an update, in seconds."""
        return float(numpy.median(self.durations_s.mean(axis=0)))


def divide_updates(times: Sequence[RankTimes]) -> Phases | None:
    """Return the phases of the updates that all ranks have recorded; None if there are too few.

    They are those of the host, unless `times` come from `use_device_clocks`.
    """
    times = align_clocks(times)
    error_s = clock_error_s(times)
    ends_ns = [each.updates["end_ns"] for each in times]
    num = min(map(len, ends_ns), default=0)
    skipped = _count_skipped(times)
    if num - skipped < _NUM_LEAST:
        return None
    seconds = numpy.zeros((len(times), num - skipped - 1, len(SHARES)))
    parts = [_divide_spans(each.spans, ends[skipped:num]) for each, ends in zip(times, ends_ns, strict=True)]
    clocks = {each.facts.get("clock") for each in times}
    can_match = len(clocks) == 1 and not any(each.facts.get("has_subgroups") for each in times)
    are_together = not can_match or _exchange_together(parts, error_s)
    can_match = can_match and are_together
    arrivals = numpy.full(seconds.shape[:2], numpy.nan)
    sites: list[dict[tuple[int, int], float]] = [{} for _ in times]
    for update in range(seconds.shape[1]):
        own = [rank_parts[update] for rank_parts in parts]
        waits, begins = _waits(own, error_s) if can_match else _no_waits(own)
        for rank, spans in enumerate(own):
            begin_ns, end_ns = (ends_ns[rank][skipped + update + offset] for offset in (0, 1))
            own_s = _own_times(spans) / 1e9
            waits_s = numpy.minimum(waits[rank], own_s)
            own_s -= waits_s
            seconds[rank, update] = _sum_phases(spans, own_s, float(waits_s.sum()), (end_ns - begin_ns) / 1e9)
            arrivals[rank, update] = begins[rank]
            _add_sites(sites[rank], spans, own_s / seconds.shape[1])
    arrivals -= numpy.nanmin(arrivals, axis=0, initial=numpy.inf, where=~numpy.isnan(arrivals))
    return Phases(
        ranks=tuple(each.rank for each in times),
        seconds=seconds,
        arrivals_s=arrivals,
        num_samples=numpy.array([each.updates["num_samples"][skipped + 1 : num] for each in times]),
        first_update=skipped + 2,
        clock=times[0].clock,
        clock_error_s=error_s,
        are_together=are_together,
        by_site=sites[0],
        by_line=tuple(_name_lines(found, each) for found, each in zip(sites, times, strict=True)),
        counts=numpy.array([_counts(each, skipped + 1, num) for each in times]),
        overlaps=numpy.array(
            [
                measure_overlap(each, own, ends[skipped:num])
                for each, own, ends in zip(times, parts, ends_ns, strict=True)
            ]
        ),
    )


def _count_skipped(times: Sequence[RankTimes]) -> int:
    """Return how many first updates are left out: to warm up, and those that torch.profiler recorded."""
    recorded = [numpy.flatnonzero(each.updates["num_samples"] < 0) for each in times]
    last = max((int(each[-1]) + 1 for each in recorded if len(each)), default=0)
    return _skip_long_ones(times, max(NUM_WARM_UP, last))


def _skip_long_ones(times: Sequence[RankTimes], skipped: int) -> int:
    """Return `skipped`, or more if the updates that follow are far longer than the later ones: they compile."""
    num = min((len(each.updates) for each in times), default=0)
    if num <= skipped:
        return skipped
    durations = numpy.mean([numpy.diff(each.updates["end_ns"][skipped:num]) for each in times], axis=0) / 1e9
    third = len(durations) // 3
    if not third:
        return skipped
    middle = float(numpy.median(durations[third:]))
    is_long = (durations > _LONG_FACTOR * middle) & (durations > middle + _LONG_S)
    if is_long[third:].any() or not is_long[:third].any():
        return skipped
    return skipped + int(numpy.flatnonzero(is_long)[-1]) + 1


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


def _sum_phases(spans: Array, own_s: Array, waiting_s: float, duration_s: float) -> Array:
    """Return the seconds of an update in each of `SHARES`."""
    by_phase = numpy.bincount(spans["phase"], weights=own_s, minlength=len(PHASES) + 1)[:OTHER]
    rest = duration_s - by_phase.sum() - waiting_s
    return numpy.concatenate([by_phase[:COMMUNICATION], [waiting_s], by_phase[COMMUNICATION:], [rest]])


def _waits(by_rank: Sequence[Array], error_s: float) -> tuple[list[Array], list[float]]:
    """Return how long each span of each rank waited for the last rank, in seconds, and when ranks came to the last one.

    Collectives of an update are matched by their order. Nothing is known of waits if the ranks have different numbers
    of them, and of those that are shorter than `error_s`, by which clocks can be off.
    """
    places = [numpy.flatnonzero(spans["phase"] == COMMUNICATION) for spans in by_rank]
    if len({len(each) for each in places}) > 1 or not len(places[0]):
        return _no_waits(by_rank)
    calls = [spans[place] for spans, place in zip(by_rank, places, strict=True)]
    last_ns = numpy.max([each["begin_ns"] for each in calls], axis=0)
    waits = [numpy.zeros(len(spans)) for spans in by_rank]
    for found, place, each in zip(waits, places, calls, strict=True):
        waited_s = numpy.clip(numpy.minimum(last_ns, each["end_ns"]) - each["begin_ns"], 0, None) / 1e9
        found[place] = numpy.where(waited_s > error_s, waited_s, 0.0)
    return waits, [float(each["begin_ns"][-1]) / 1e9 for each in calls]


def _exchange_together(parts: Sequence[Sequence[Array]], error_s: float) -> bool:
    """True if the ranks' last exchanges of gradients in an update overlap in time, in half of the updates or more.

    No rank has its gradients before every rank has come to the exchange. Otherwise a rank has made updates that others
    have not, so that the updates of one number are different ones. `parts`: by rank, the spans of each update.
    """
    num = num_together = 0
    for own in zip(*parts, strict=True):
        exchanges = [spans[(spans["phase"] == COMMUNICATION) & (spans["site"] == -1)] for spans in own]
        if not all(map(len, exchanges)):
            num += any(map(len, exchanges))
            continue
        begin_ns = max(int(each["begin_ns"][-1]) for each in exchanges)
        end_ns = min(int(each["end_ns"][-1]) for each in exchanges)
        num, num_together = num + 1, num_together + (begin_ns <= end_ns + error_s * 1e9)
    return 2 * num_together >= num


def _no_waits(by_rank: Sequence[Array]) -> tuple[list[Array], list[float]]:
    return [numpy.zeros(len(spans)) for spans in by_rank], [float("nan")] * len(by_rank)


def _add_sites(found: dict[tuple[int, int], float], spans: Array, own_s: Array) -> None:
    for phase, site, seconds in zip(spans["phase"].tolist(), spans["site"].tolist(), own_s.tolist(), strict=True):
        if site >= 0:
            found[phase, site] = found.get((phase, site), 0.0) + seconds


def _name_lines(found: dict[tuple[int, int], float], times: RankTimes) -> dict[tuple[str, CodeLine], float]:
    names = (*PHASES, "other")
    return {(names[phase], times.sites[site]): s for (phase, site), s in found.items() if site in times.sites}


def _counts(times: RankTimes, first: int, end: int) -> Array:
    counts = times.counts[first:end]
    return counts if len(counts) == end - first else numpy.zeros(end - first, COUNTS)


def measure_overlap(times: RankTimes, by_update: Sequence[Array], ends_ns: Array) -> Array:
    """Return by update, in seconds: how long a bucket was exchanged while backward computed, and how long one could be.

    The second begins with the first bucket and ends with the last gradient. Both are NaN in updates whose buckets were
    not timed. `by_update`: the spans between two of `ends_ns`. [updates, 2]
    """
    found = numpy.full((len(by_update), 2), numpy.nan)
    buckets = times.buckets[numpy.argsort(times.buckets["begin_ns"], kind="stable")]
    firsts = numpy.searchsorted(buckets["begin_ns"], ends_ns, side="right")
    for update, spans in enumerate(by_update):
        inside = buckets[firsts[update] : firsts[update + 1]]
        if len(inside):
            computes = list(_find_computes(spans))
            begin_ns = int(inside["begin_ns"][0])
            window_ns = sum(max(0, end - max(begin, begin_ns)) for begin, end in computes)
            found[update] = _covered_ns(inside, computes) / 1e9, window_ns / 1e9
    return found


def _find_computes(spans: Array) -> Iterator[tuple[int, int]]:
    """Yield the times in which a backward pass computes: those without the collectives that it waits for."""
    for begin_ns, end_ns in spans[spans["phase"] == _BACKWARD][["begin_ns", "end_ns"]].tolist():
        waits = spans[(spans["phase"] == COMMUNICATION) & (spans["begin_ns"] >= begin_ns)]
        for wait_ns, waited_ns in waits[waits["end_ns"] <= end_ns][["begin_ns", "end_ns"]].tolist():
            yield begin_ns, max(begin_ns, wait_ns)
            begin_ns = max(begin_ns, waited_ns)
        yield begin_ns, end_ns


def _covered_ns(buckets: Array, computes: Sequence[tuple[int, int]]) -> int:
    """Return how long at least one of `buckets`, ordered by their begin, was exchanged inside `computes`."""
    covered = 0
    for begin_ns, end_ns in computes:
        at_ns = begin_ns
        for first_ns, last_ns in buckets[["begin_ns", "end_ns"]].tolist():
            at_ns = max(at_ns, first_ns)
            if min(last_ns, end_ns) > at_ns:
                covered += min(last_ns, end_ns) - at_ns
                at_ns = min(last_ns, end_ns)
    return covered
