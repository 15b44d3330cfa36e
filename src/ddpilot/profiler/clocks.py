# SPDX-License-Identifier: Apache-2.0
"""Put what ranks of several nodes have recorded on one clock, that of the first rank. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from ddpilot.profiler.spans_file import RankTimes

ERROR_FACT = "clock_error_ns"
"""Fact about a rank whose times were moved to the first rank's clock: how far they can be off."""
_GOOD = 2.0
"""Measurements whose error is at most this many times the smallest count; the others met a busy core or network."""
Array = numpy.ndarray[Any, Any]


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
