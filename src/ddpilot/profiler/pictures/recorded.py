# SPDX-License-Identifier: Apache-2.0
"""Select the spans of a typical update, and memory over time, for pictures. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from ddpilot.profiler.phases import COMMUNICATION, Phases
from ddpilot.profiler.spans_file import PHASES, RankTimes

_MAX_SPANS = 400
"""Spans of one rank in a timeline; of more, the longest are kept."""
_MAX_POINTS = 300
"""Points of one rank over time; of more, the highest of each group is kept."""
Array = numpy.ndarray[Any, Any]


class Span(NamedTuple):
    """A span of a rank's main thread. Spans nest: an inner one comes after the one around it."""

    begin_s: float
    end_s: float
    name: str
    """One of `SHARES`."""
    line: str
    """The user's line; "" if it is not known."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One update on all ranks."""

    update: int
    """Its number, from 1."""
    ranks: tuple[int, ...]
    begins_s: tuple[float, ...]
    """By rank, when the update begins, after the first rank to begin it."""
    ends_s: tuple[float, ...]
    spans: tuple[tuple[Span, ...], ...]
    """By rank. Their times count from the begin of the first rank, or of each rank if its clocks differ."""
    buckets: tuple[tuple[tuple[float, float], ...], ...] = ()
    """By rank, begin and end of the exchange of each bucket, on the same clocks; none if they were not timed."""
    has_one_clock: bool
    """False if the ranks are on machines whose clocks differ: each one begins at 0."""


@dataclass(frozen=True, kw_only=True)
class MemoryCourse:
    """Memory over time, by rank. Times count from the first sample of each rank."""

    seconds: tuple[Array, ...]
    host_bytes: tuple[Array, ...]
    """Resident memory of the process."""
    device_bytes: tuple[Array, ...]
    """Bytes that torch has allocated on the device; empty arrays without a device."""


def make_timeline(phases: Phases, times: Sequence[RankTimes]) -> Timeline:
    """Return the update whose duration is nearest to the median, of those whose buckets were timed if there are any."""
    durations = phases.durations_s.mean(axis=0)
    distances = numpy.abs(durations - numpy.median(durations))
    if phases.overlapped_s is not None:
        is_timed = ~numpy.isnan(phases.overlaps[:, :, 0]).any(axis=0)
        distances[~is_timed & is_timed.any()] = numpy.inf
    place = int(distances.argmin())
    first = phases.first_update - 2 + place  # index of the end of the update before
    bounds = [(int(each.updates["end_ns"][first]), int(each.updates["end_ns"][first + 1])) for each in times]
    has_one_clock = len({each.facts.get("clock") for each in times}) == 1
    zeros = [min(begin for begin, _ in bounds)] * len(bounds) if has_one_clock else [begin for begin, _ in bounds]
    last_ns = _last_arrivals(times, bounds) if not numpy.isnan(phases.arrivals_s[:, place]).any() else None
    return Timeline(
        update=phases.first_update + place,
        ranks=phases.ranks,
        begins_s=tuple((begin - zero) / 1e9 for (begin, _), zero in zip(bounds, zeros, strict=True)),
        ends_s=tuple((end - zero) / 1e9 for (_, end), zero in zip(bounds, zeros, strict=True)),
        spans=tuple(
            _spans_of(each, bound, zero, last_ns) for each, bound, zero in zip(times, bounds, zeros, strict=True)
        ),
        buckets=tuple(_buckets_of(each, bound, zero) for each, bound, zero in zip(times, bounds, zeros, strict=True)),
        has_one_clock=has_one_clock,
    )


def _buckets_of(times: RankTimes, bound: tuple[int, int], zero_ns: int) -> tuple[tuple[float, float], ...]:
    found = times.buckets
    found = found[(found["begin_ns"] > bound[0]) & (found["begin_ns"] <= bound[1])]
    ends_ns = numpy.minimum(found["end_ns"], bound[1])
    return tuple(zip((found["begin_ns"] - zero_ns) / 1e9, (ends_ns - zero_ns) / 1e9, strict=True))[:_MAX_SPANS]


def _inside(times: RankTimes, bound: tuple[int, int]) -> Array:
    """Return the spans in `bound`, outer ones first, cut at its begin and end."""
    spans = times.spans
    found = spans[(spans["end_ns"] > bound[0]) & (spans["begin_ns"] < bound[1])].copy()
    found["begin_ns"] = numpy.maximum(found["begin_ns"], bound[0])
    found["end_ns"] = numpy.minimum(found["end_ns"], bound[1])
    return numpy.asarray(found[numpy.lexsort((-found["end_ns"], found["begin_ns"]))])


def _last_arrivals(times: Sequence[RankTimes], bounds: Sequence[tuple[int, int]]) -> Array | None:
    """Return for each collective when the last rank came to it; None if the ranks have different numbers of them."""
    begins = []
    for each, bound in zip(times, bounds, strict=True):
        inside = _inside(each, bound)
        begins.append(inside[inside["phase"] == COMMUNICATION]["begin_ns"])
    return numpy.max(begins, axis=0) if len({len(each) for each in begins}) == 1 else None


def _spans_of(times: RankTimes, bound: tuple[int, int], zero_ns: int, last_ns: Array | None) -> tuple[Span, ...]:
    found, num_collectives = [], 0
    for row in _inside(times, bound):
        begin, end = int(row["begin_ns"]), int(row["end_ns"])
        name = PHASES[row["phase"]] if row["phase"] < len(PHASES) else "other"
        site = times.sites.get(int(row["site"]))
        line = f"{site.file}:{site.line}" if site is not None else ""
        if row["phase"] == COMMUNICATION and last_ns is not None:
            arrival = min(max(int(last_ns[num_collectives]), begin), end)
            num_collectives += 1
            if arrival > begin:
                found.append(Span((begin - zero_ns) / 1e9, (arrival - zero_ns) / 1e9, "waiting", line))
            begin = arrival
        if end > begin:
            found.append(Span((begin - zero_ns) / 1e9, (end - zero_ns) / 1e9, name, line))
    if len(found) > _MAX_SPANS:
        least = sorted((each.end_s - each.begin_s for each in found), reverse=True)[_MAX_SPANS - 1]
        found = [each for each in found if each.end_s - each.begin_s >= least]
    return tuple(found)


def full_lateness(late_s: Array) -> float:
    """Return the lateness in seconds that is drawn strongest: of the last rank, but for outliers.

    `late_s`: [ranks, updates]; NaN where nothing is known, but not everywhere.
    """
    known = late_s[:, ~numpy.isnan(late_s).any(axis=0)]
    return max(float(numpy.percentile(known.max(axis=0), 90)), 1e-6) if known.size else 1e-6


def make_memory_course(times: Sequence[RankTimes]) -> MemoryCourse:
    """Return the samples of all ranks, thinned out."""
    thinned = [_thin(each.memory) for each in times]
    return MemoryCourse(
        seconds=tuple((each["time_ns"] - each["time_ns"][:1].sum()) / 1e9 for each in thinned),
        host_bytes=tuple(each["host_bytes"] for each in thinned),
        device_bytes=tuple(each["device_bytes"][each["device_bytes"] >= 0] for each in thinned),
    )


def _thin(samples: Array) -> Array:
    """Return at most `_MAX_POINTS` samples: of each group the one with the most memory."""
    if len(samples) <= _MAX_POINTS:
        return samples
    groups = numpy.array_split(numpy.arange(len(samples)), _MAX_POINTS)
    field = "device_bytes" if (samples["device_bytes"] > 0).any() else "host_bytes"
    return numpy.asarray(samples[[int(group[samples[field][group].argmax()]) for group in groups]])
