# SPDX-License-Identifier: Apache-2.0
"""Which update a timeline shows, with which spans, and how memory over time is thinned out."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from ddpilot.profiler.phases import Phases, divide_updates
from ddpilot.profiler.pictures.recorded import full_lateness, make_memory_course, make_timeline
from ddpilot.profiler.spans_file import MEMORY, RankTimes, TimesWriter, find_ranks, read_times
from tests.unit.profiler.recordings import LATE_RANK, write_recording


def read(folder: Path) -> tuple[Phases, list[RankTimes]]:
    """The phases and times of all ranks."""
    times = [read_times(folder, rank) for rank in find_ranks(folder)]
    phases = divide_updates(times)
    assert phases is not None
    return phases, times


def test_the_timeline_has_the_update_nearest_to_the_median(tmp_path: Path) -> None:
    """Its spans lie inside, add up to the phases of this update, and waiting is divided from communication."""
    write_recording(tmp_path, 3, 30)
    phases, times = read(tmp_path)
    timeline = make_timeline(phases, times)
    durations = phases.durations_s.mean(axis=0)
    place = timeline.update - phases.first_update
    assert abs(durations[place] - numpy.median(durations)) == numpy.abs(durations - numpy.median(durations)).min()
    assert timeline.has_one_clock
    assert min(timeline.begins_s) == 0
    for rank, spans in enumerate(timeline.spans):
        for name in ("data", "forward", "waiting", "communication", "optimizer"):
            seconds = sum(each.end_s - each.begin_s for each in spans if each.name == name)
            assert seconds == pytest.approx(phases.share(name)[rank, place], abs=1e-6)
        assert all(timeline.begins_s[rank] <= each.begin_s < each.end_s <= timeline.ends_s[rank] for each in spans)
        assert [each.line for each in spans if each.name == "data"] == ["train.py:7"]
    assert "waiting" not in {each.name for each in timeline.spans[LATE_RANK]}


def test_ranks_with_different_clocks_begin_at_zero(tmp_path: Path) -> None:
    """And have no waiting: it is not known which one was last."""
    write_recording(tmp_path, 2, 12)
    TimesWriter(tmp_path, 1).write_fact("clock", "another")
    timeline = make_timeline(*read(tmp_path))
    assert not timeline.has_one_clock
    assert timeline.begins_s == (0.0, 0.0)
    assert "waiting" not in {each.name for spans in timeline.spans for each in spans}


def test_of_many_spans_the_longest_are_kept(tmp_path: Path) -> None:
    """A rank that calls thousands of collectives in an update makes no large report."""
    write_recording(tmp_path, 1, 12)
    _, (times,) = read(tmp_path)
    end_ns = int(times.updates["end_ns"][-1])
    writer = TimesWriter(tmp_path, 0)
    for update in range(12):
        begin = int(times.updates["end_ns"][update]) - 2_000_000
        writer.write_spans([(begin + 100 * at, begin + 100 * at + 50 + at % 7, 4, -1) for at in range(3000)])
    phases, found = read(tmp_path)
    timeline = make_timeline(phases, found)
    assert end_ns > 0
    assert 5 < len(timeline.spans[0]) < 1000
    assert "forward" in {each.name for each in timeline.spans[0]}


def test_memory_is_thinned_out_to_its_highest_samples() -> None:
    """The peak is kept, and so is the order."""
    samples = numpy.zeros(5000, MEMORY)
    samples["time_ns"] = 1_000_000_000 + numpy.arange(5000) * 20_000_000
    samples["host_bytes"] = 1000
    samples["host_bytes"][3333] = 9000
    samples["device_bytes"] = -1
    nothing = numpy.zeros(0)
    times = RankTimes(rank=0, spans=nothing, updates=nothing, sites={}, facts={}, memory=samples)
    course = make_memory_course([times])
    assert len(course.seconds[0]) == 300
    assert course.host_bytes[0].max() == 9000
    assert (numpy.diff(course.seconds[0]) > 0).all()
    assert course.seconds[0][0] == 0
    assert len(course.device_bytes[0]) == 0


def test_outliers_do_not_set_the_scale_of_lateness() -> None:
    """One rank of 64 does, as it is the last in every update."""
    late = numpy.full((64, 100), 0.0001)
    late[5] = 0.007
    late[9, 3] = 5.0
    late[:, 8] = numpy.nan
    assert full_lateness(late) == pytest.approx(0.007)
    assert full_lateness(numpy.full((2, 3), numpy.nan)) > 0
