# SPDX-License-Identifier: Apache-2.0
"""Communication counts as overlapped while backward computes, once, and where buckets were timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import pytest

from ddpilot.profiler.overlap import measure_overlap
from ddpilot.profiler.spans_file import BUCKET, PHASES, SPAN, UPDATE, RankTimes

BACKWARD, COMMUNICATION = PHASES.index("backward"), PHASES.index("communication")
MS = 1_000_000


def measure(buckets_ms: Sequence[tuple[float, float]]) -> Any:
    """Milliseconds of an update whose backward pass computes from 10 to 20 ms, and then waits until 25 ms."""
    spans = numpy.array([(10 * MS, 25 * MS, BACKWARD, -1), (20 * MS, 25 * MS, COMMUNICATION, -1)], SPAN)
    times = RankTimes(
        rank=0,
        spans=spans,
        updates=numpy.zeros(0, UPDATE),
        sites={},
        facts={},
        buckets=numpy.array([(begin * MS, end * MS, 8) for begin, end in buckets_ms], BUCKET),
    )
    ends_ns = numpy.array([0, 30 * MS, 60 * MS])
    return measure_overlap(times, [spans, spans[:0]], ends_ns) * 1e3


@pytest.mark.parametrize(
    ("buckets_ms", "overlapped_ms", "window_ms"),
    [
        ([(20.1, 25)], 0, 0),  # one bucket: it begins after the last gradient
        ([(12, 14), (20, 25)], 2, 8),
        ([(12, 24), (20, 25)], 8, 8),  # up to the last gradient
        ([(12, 16), (14, 18), (15, 17)], 6, 8),  # at the same time: counted once
        ([(15, 16), (12, 13)], 2, 8),  # in the order in which they ended
    ],
)
def test_time_is_counted_once_and_up_to_the_last_gradient(
    buckets_ms: Sequence[tuple[float, float]], overlapped_ms: float, window_ms: float
) -> None:
    """The window begins with the first bucket."""
    assert measure(buckets_ms)[0] == pytest.approx([overlapped_ms, window_ms])


def test_an_update_without_timed_buckets_is_not_known() -> None:
    """It is NaN, not 0."""
    assert numpy.isnan(measure([(12, 14)])[1]).all()
    assert numpy.isnan(measure([])).all()
