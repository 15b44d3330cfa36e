# SPDX-License-Identifier: Apache-2.0
"""Convert recorded times: to those of the devices, and on several nodes to the clock of the first rank. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from ddpilot.profiler.spans_file import DEVICE_CLOCK_FACT, RankTimes

ERROR_FACT = "clock_error_ns"
"""Fact about a rank whose times were moved to the first rank's clock: how far they can be off."""
_GOOD = 2.0
"""Measurements whose error is at most this many times the smallest count; the others met a busy core or network."""
Array = numpy.ndarray[Any, Any]


def use_device_clocks(times: Sequence[RankTimes]) -> Sequence[RankTimes]:
    """Return when the ranks' devices were at the begin and end of spans, updates and buckets, on CLOCK_MONOTONIC.

    Returns `times`, which are those of the hosts, unless all ranks have recorded both.
    """
    can = all(each.facts.get(DEVICE_CLOCK_FACT) and len(each.marks) for each in times)
    return [_use_device_clock(each) for each in times] if can else times


def _use_device_clock(times: RankTimes) -> RankTimes:
    fact = times.facts[DEVICE_CLOCK_FACT]
    marks = times.marks[numpy.argsort(times.marks["host_ns"], kind="stable")]
    reached_ns = _to_host(marks["device_ns"], numpy.array(fact["points"], dtype=numpy.int64))
    is_main = ~marks["is_beside"]
    main = marks["host_ns"][is_main], numpy.maximum.accumulate(reached_ns[is_main])
    spans, updates, buckets = times.spans.copy(), times.updates.copy(), times.buckets.copy()
    for moved, names in ((spans, ("begin_ns", "end_ns")), (updates, ("end_ns",))):
        for name in names:
            moved[name] = _look_up(moved[name], *main)
    for name in ("begin_ns", "end_ns"):
        buckets[name] = _look_up(buckets[name], marks["host_ns"], reached_ns)
    return replace(times, spans=spans, updates=updates, buckets=buckets, clock=str(fact["type"]))


def _to_host(device_ns: Array, points: Array) -> Array:
    """Return times of the device on the host's clock. `points`: of both, at the begin and perhaps at the end."""
    drift = numpy.diff(points[:, 0] - points[:, 1]) / numpy.maximum(numpy.diff(points[:, 1]), 1)
    return numpy.asarray(device_ns + points[0, 0] + numpy.round(device_ns * drift.sum()).astype(numpy.int64))


def _look_up(host_ns: Array, marks_ns: Array, reached_ns: Array) -> Array:
    """Return when the device was at the points at which the host was at `host_ns`.

    At a point without a mark it was between the marks around it, and not before the host.
    """
    after = numpy.searchsorted(marks_ns, host_ns)
    last = len(marks_ns) - 1
    is_mark = marks_ns[numpy.minimum(after, last)] == host_ns
    earliest = numpy.where(after > 0, reached_ns[numpy.maximum(after - 1, 0)], host_ns)
    latest = numpy.where(after <= last, reached_ns[numpy.minimum(after, last)], numpy.maximum(host_ns, earliest))
    between = numpy.minimum(numpy.maximum(host_ns, earliest), latest)
    return numpy.asarray(numpy.where(is_mark, reached_ns[numpy.minimum(after, last)], between))


@dataclass(frozen=True)
class ClockOffset:
    """The first rank's clock minus that of a node, by time: in between it is interpolated. Nanoseconds."""

    at_ns: Array
    offset_ns: Array
    error_ns: int
    """How far it can be off: half of the round trip of the measurements that count."""

    def to_first(self, times_ns: Array) -> Array:
        """Return times of the node on the first rank's clock."""
        first = int(self.offset_ns[0])  # doubles are exact for small differences only
        moved = numpy.interp((times_ns - self.at_ns[0]), self.at_ns - self.at_ns[0], self.offset_ns - first)
        return numpy.asarray(times_ns + first + numpy.round(moved).astype(numpy.int64))


def find_offsets(facts: Sequence[Mapping[str, Any]]) -> dict[str, ClockOffset | None]:
    """Return the offset of each clock that ranks have had, by its name: None for that of the first rank.

    `facts`: of each rank. A clock that was not compared with the first rank's is missing.
    """
    found: dict[str, ClockOffset | None] = {}
    for each in facts[1:]:
        measured = numpy.array(each.get("clock_offsets", ()), dtype=numpy.int64).reshape(-1, 3)
        if len(measured):
            good = measured[measured[:, 2] <= _GOOD * measured[:, 2].min()]
            found[str(each.get("clock"))] = ClockOffset(good[:, 0], good[:, 1], int(good[:, 2].max()))
    if facts:
        found[str(facts[0].get("clock"))] = None
    return found


def align_clocks(times: Sequence[RankTimes]) -> list[RankTimes]:
    """Return `times` with spans and updates on the first rank's clock, and with `ERROR_FACT` where they were moved.

    A rank whose clock was not compared keeps its own.
    """
    offsets = find_offsets([each.facts for each in times])
    return [_move(each, offsets.get(str(each.facts.get("clock"))), times[0]) for each in times]


def _move(times: RankTimes, offset: ClockOffset | None, first: RankTimes) -> RankTimes:
    if offset is None:
        return times
    spans, updates, buckets = times.spans.copy(), times.updates.copy(), times.buckets.copy()
    for moved in (spans, buckets):
        for name in ("begin_ns", "end_ns"):
            moved[name] = offset.to_first(moved[name])
    updates["end_ns"] = offset.to_first(updates["end_ns"])
    facts = {**times.facts, "clock": first.facts.get("clock"), ERROR_FACT: offset.error_ns}
    return replace(times, spans=spans, updates=updates, buckets=buckets, facts=facts)


def clock_error_s(times: Sequence[RankTimes]) -> float:
    """Return how far the clocks of two ranks can be off after `align_clocks`, in seconds; 0.0 on one node."""
    return max((each.facts.get(ERROR_FACT, 0) for each in times), default=0) / 1e9
