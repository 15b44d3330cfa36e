# SPDX-License-Identifier: Apache-2.0
"""How times of nodes are put on one clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from ddpilot.profiler.clocks import align_clocks, clock_error_s, find_offsets
from ddpilot.profiler.phases import divide_updates
from ddpilot.profiler.spans_file import PHASES, TimesWriter, read_times

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
