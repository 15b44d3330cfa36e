# SPDX-License-Identifier: Apache-2.0
"""How times of nodes are put on one clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from ddpilot.profiler.clocks import align_clocks, clock_error_s, find_offsets, use_device_clocks
from ddpilot.profiler.phases import divide_updates
from ddpilot.profiler.spans_file import BUCKET, MARK, PHASES, SPAN, UPDATE, RankTimes, TimesWriter, read_times

MS = 1_000_000
AHEAD_NS = 3_000 * MS
BASE_NS = 1 << 50


def write(folder: Path, rank: int, ahead_ns: int, late_ns: int, **facts: Any) -> None:
    """Updates of 20 ms with an all_reduce from 10 ms, or later, until 18 ms; by a clock that is ahead."""
    writer = TimesWriter(folder, rank)
    for update in range(12):
        begin = BASE_NS + ahead_ns + update * 20 * MS
        called, done = begin + 10 * MS + late_ns, begin + 18 * MS
        writer.write_spans([(called, done, PHASES.index("communication"), -1)])
        writer.write_updates([(begin + 20 * MS, 8)])
    for name, value in facts.items():
        writer.write_fact(name, value)


def offsets(error_ns: int) -> list[tuple[int, int, int]]:
    """What a node has measured: one time was asked in a busy moment."""
    begin = BASE_NS + AHEAD_NS
    return [
        (begin, -AHEAD_NS, error_ns),
        (begin + MS, -AHEAD_NS + 5 * MS, 9 * MS),
        (begin + 900 * MS, -AHEAD_NS, error_ns),
    ]


def test_clocks_that_were_compared_are_aligned_and_the_late_rank_is_found(tmp_path: Path) -> None:
    """Rank 0 waits 4 ms in every update, although the other node's clock is 3 s ahead; the bad moment is left out."""
    write(tmp_path, 0, 0, 0, clock="a")
    write(tmp_path, 1, AHEAD_NS, 4 * MS, clock="b", clock_offsets=offsets(100_000))
    times = [read_times(tmp_path, rank) for rank in (0, 1)]
    assert clock_error_s(align_clocks(times)) == pytest.approx(1e-4)
    phases = divide_updates(times)
    assert phases is not None
    assert phases.share("waiting").mean(axis=1) == pytest.approx([0.004, 0.0])
    assert phases.clock_error_s == pytest.approx(1e-4)


def test_waits_below_the_error_of_the_clocks_are_not_claimed(tmp_path: Path) -> None:
    """4 ms, where clocks can be off by 5."""
    write(tmp_path, 0, 0, 0, clock="a")
    write(tmp_path, 1, AHEAD_NS, 4 * MS, clock="b", clock_offsets=offsets(5 * MS))
    phases = divide_updates([read_times(tmp_path, rank) for rank in (0, 1)])
    assert phases is not None
    assert not phases.share("waiting").any()


def test_clocks_that_were_not_compared_keep_their_times(tmp_path: Path) -> None:
    """Then nothing is known of waits."""
    write(tmp_path, 0, 0, 0, clock="a")
    write(tmp_path, 1, AHEAD_NS, 4 * MS, clock="b")
    times = [read_times(tmp_path, rank) for rank in (0, 1)]
    assert find_offsets([each.facts for each in times]) == {"a": None}
    assert align_clocks(times)[1].updates["end_ns"][0] == times[1].updates["end_ns"][0]
    phases = divide_updates(times)
    assert phases is not None
    assert not phases.share("waiting").any()


def test_a_clock_that_drifts_is_followed(tmp_path: Path) -> None:
    """Between two measurements the offset is interpolated."""
    begin = BASE_NS + AHEAD_NS
    measured = [(begin, -AHEAD_NS, 1000), (begin + 1000 * MS, -AHEAD_NS - MS, 1000)]
    offset = find_offsets([{"clock": "a"}, {"clock": "b", "clock_offsets": measured}])["b"]
    assert offset is not None
    moved = offset.to_first(numpy.array([begin, begin + 500 * MS, begin + 2000 * MS], dtype=numpy.int64))
    assert list(moved - BASE_NS) == [0, 500 * MS - MS // 2, 2000 * MS - MS]


def record_on_device(facts: dict[str, Any]) -> RankTimes:
    """A forward pass that the host queues from 0 to 1 ms and the device runs from 0 to 6 ms; the next one until 9 ms.

    In between the host loads data, from 2 to 4 ms, without a mark at its begin. The device's clock is 7 s behind, and
    loses 1 us in each ms.
    """
    forward, data = PHASES.index("forward"), PHASES.index("data")
    spans = [(0, 1 * MS, forward, -1), (2 * MS, 4 * MS, data, -1), (5 * MS, 6 * MS, forward, -1)]
    reached_ms = {0: 0.0, 1: 6.0, 4: 6.5, 5: 6.5, 6: 9.0}
    marks = [(host * MS + 7_000 * MS, round(at * MS * 0.999), False) for host, at in reached_ms.items()]
    marks.append((round(0.5 * MS) + 7_000 * MS, round(8 * MS * 0.999), True))  # on the stream of a collective
    moved = [(begin + 7_000 * MS, end + 7_000 * MS, phase, site) for begin, end, phase, site in spans]
    return RankTimes(
        rank=0,
        spans=numpy.array(moved, SPAN),
        updates=numpy.array([(6 * MS + 7_000 * MS, 8)], UPDATE),
        sites={},
        facts=facts,
        buckets=numpy.array([(round(0.5 * MS) + 7_000 * MS,) * 2 + (8,)], BUCKET),
        marks=numpy.array(marks, MARK),
    )


def test_times_of_the_device_are_when_it_reached_the_points_of_the_program() -> None:
    """Data is loaded while the device computes: it waits for 0.5 ms of it. The end without a drift is the begin's."""
    points = [[7_000 * MS, 0], [7_100 * MS, round(99.9 * MS)]]
    found = use_device_clocks([record_on_device({"device_clock": {"type": "cuda", "points": points}})])[0]
    assert found.clock == "cuda"
    spans_ms = [[(each - 7_000 * MS) / MS for each in found.spans[name]] for name in ("begin_ns", "end_ns")]
    assert spans_ms[0] == pytest.approx([0, 6, 6.5], abs=1e-3)
    assert spans_ms[1] == pytest.approx([6, 6.5, 9], abs=1e-3)
    assert (found.updates["end_ns"][0] - 7_000 * MS) / MS == pytest.approx(9, abs=1e-3)
    assert (found.buckets["begin_ns"][0] - 7_000 * MS) / MS == pytest.approx(8, abs=1e-3)


def test_without_marks_on_all_ranks_the_times_are_those_of_the_hosts() -> None:
    """One rank has trained on the CPU."""
    with_marks = record_on_device({"device_clock": {"type": "cuda", "points": [[7_000 * MS, 0]]}})
    times = [with_marks, record_on_device({})]
    assert use_device_clocks(times) is times
    assert use_device_clocks([with_marks])[0].spans["end_ns"][0] == 7_000 * MS + round(6 * MS * 0.999)
