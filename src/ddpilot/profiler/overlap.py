# SPDX-License-Identifier: Apache-2.0
"""Measure the communication that ran while backward computed, and the time in which it could. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from ddpilot.profiler.spans_file import PHASES, RankTimes

_BACKWARD, _COMMUNICATION = PHASES.index("backward"), PHASES.index("communication")
Array = numpy.ndarray[Any, Any]


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
        waits = spans[(spans["phase"] == _COMMUNICATION) & (spans["begin_ns"] >= begin_ns)]
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
