# SPDX-License-Identifier: Apache-2.0
"""How the spans of ranks become phases of updates, and phases findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from ddpilot.errors import RecordError
from ddpilot.profiler.judgements.ranks import find_straggler
from ddpilot.profiler.phases import NUM_WARM_UP, Phases, divide_updates, measure_overlap
from ddpilot.profiler.result import Profile, judge, read_profile
from ddpilot.profiler.spans_file import BUCKET, PHASES, SPAN, UPDATE, RankTimes, TimesWriter, read_times
from ddpilot.user_files import CodeLine

MS = 1_000_000
NUM_UPDATES = 12


def number(name: str) -> int:
    """The number of a phase."""
    return PHASES.index(name)


def write_rank(folder: Path, rank: int, lengths_ms: dict[str, float], ready_ms: float, end_ms: float) -> None:
    """Updates of `end_ms`: phases one after another from their begin on, then backward, whose gradients are ready at
    `ready_ms`, until 1 ms before the end; the optimizer's step takes that."""
    writer = TimesWriter(folder, rank)
    for update in range(NUM_UPDATES):
        begin = int(update * end_ms * MS)
        at, spans = begin, []
        for name, length_ms in lengths_ms.items():
            end = at + int(length_ms * MS)
            spans.append((at, end, number(name), 0 if name in ("checkpoint", "communication") else -1))
            at = end
        ready, done = begin + int(ready_ms * MS), begin + int((end_ms - 1) * MS)
        spans += [(ready, done, number("communication"), -1), (at, done, number("backward"), -1)]
        spans.append((done, done + MS, number("optimizer"), -1))
        writer.write_spans(spans)
        writer.write_updates([(done + MS, 8)])
    writer.write_fact("site", [0, "train.py", 7, "train", "dist.all_reduce(loss)"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks with updates of 20 ms, of which rank 1 loads data for 8 ms and comes 7 ms later."""
    write_rank(tmp_path, 0, {"data": 1, "forward": 3}, ready_ms=8, end_ms=20)
    write_rank(tmp_path, 1, {"data": 8, "forward": 3}, ready_ms=15, end_ms=20)
    return tmp_path


def phases_of(folder: Path) -> Phases:
    """The phases of both ranks."""
    found = divide_updates([read_times(folder, rank) for rank in (0, 1)])
    assert found is not None
    return found


def test_phases_add_up_to_the_update_and_inner_spans_count_once(folder: Path) -> None:
    """Backward from 4 to 19 ms contains communication from 8 to 19 ms, of which 7 are waiting for rank 1."""
    phases = phases_of(folder)
    assert phases.seconds.shape[:2] == (2, NUM_UPDATES - NUM_WARM_UP - 1)
    assert phases.durations_s == pytest.approx(0.020)
    means = {
        name: list(phases.share(name).mean(axis=1) * 1e3) for name in ("data", "waiting", "communication", "backward")
    }
    assert means["data"] == pytest.approx([1, 8])
    assert means["backward"] == pytest.approx([4, 4])
    assert means["waiting"] == pytest.approx([7, 0])
    assert means["communication"] == pytest.approx([4, 4])
    assert phases.samples_per_s == pytest.approx(2 * 8 / 0.020)


def test_the_rank_that_others_wait_for_is_found_with_its_phase(folder: Path) -> None:
    """Rank 1 is last in every update, by 7 ms, in loading data."""
    found = find_straggler(phases_of(folder))
    assert found is not None
    assert (found.place, found.share, found.phase) == (1, 1.0, "data")
    assert found.late_s == pytest.approx(0.007)


def test_what_it_would_give_is_said_and_sorts_the_findings(folder: Path) -> None:
    """Without the straggler an update takes 13 ms."""
    profile = read_profile(folder)
    first = profile.judged[0]
    assert (first.finding.code, first.finding.ranks) == ("DDP722", (1,))
    assert first.factor == pytest.approx(20 / 13)
    assert [each.factor for each in profile.judged] == sorted((each.factor for each in profile.judged), reverse=True)
    assert "rank 1 is last in 100% of updates, by 7 ms, in loading data" in " ".join(str(profile).split())


@pytest.mark.parametrize(
    ("lengths_ms", "ready_ms", "code"),
    [
        ({"data": 9, "forward": 3}, 18, "DDP721"),
        ({"data": 0.5, "forward": 3}, 8, "DDP723"),
        ({"communication": 5, "forward": 3}, 17, "DDP724"),
        ({"checkpoint": 5, "forward": 3}, 17, "DDP725"),
        ({"forward": 10}, 18, ""),
    ],
)
def test_each_cause_is_named(tmp_path: Path, lengths_ms: dict[str, float], ready_ms: float, code: str) -> None:
    """The same on both ranks; the line is named where there is one."""
    for rank in (0, 1):
        write_rank(tmp_path, rank, lengths_ms, ready_ms, end_ms=20)
    found = read_profile(tmp_path).findings
    assert [each.code for each in found] == ([code] if code else [])
    if code in ("DDP724", "DDP725"):
        assert found[0].place == CodeLine("train.py", 7, "train", "dist.all_reduce(loss)")


def test_ranks_with_different_numbers_of_collectives_have_no_waits(tmp_path: Path) -> None:
    """Nothing is made up where collectives cannot be matched by their order."""
    write_rank(tmp_path, 0, {"communication": 2}, ready_ms=8, end_ms=20)
    write_rank(tmp_path, 1, {}, ready_ms=15, end_ms=20)
    phases = phases_of(tmp_path)
    assert numpy.isnan(phases.arrivals_s).all()
    assert not phases.share("waiting").any()
    assert find_straggler(phases) is None


@pytest.mark.parametrize("fact", ["has_subgroups", "clock"])
def test_collectives_that_cannot_be_matched_have_no_waits(folder: Path, fact: str) -> None:
    """The nth collectives of two ranks may be those of two groups; clocks of two machines differ."""
    TimesWriter(folder, 1).write_fact(fact, "another")
    phases = phases_of(folder)
    assert not phases.share("waiting").any()
    assert find_straggler(phases) is None


def test_a_span_over_several_updates_counts_in_each(tmp_path: Path) -> None:
    """Also if inner ones ended earlier, and spans were not written in the order of their ends."""
    writer = TimesWriter(tmp_path, 0)
    num = NUM_WARM_UP + 4
    writer.write_spans([(0, 10 * num * MS, number("data"), -1)])
    for update in range(num):
        writer.write_spans([((10 * update + 1) * MS, (10 * update + 4) * MS, number("forward"), -1)])
        writer.write_updates([(10 * (update + 1) * MS, 8)])
    phases = divide_updates([read_times(tmp_path, 0)])
    assert phases is not None
    assert phases.share("data") == pytest.approx(0.007)
    assert phases.share("forward") == pytest.approx(0.003)


def test_a_rank_that_was_killed_while_it_wrote_is_read(folder: Path) -> None:
    """A part of a span, and a part of an update, are left out."""
    with open(folder / "rank1.spans.bin", "ab") as file:
        file.write(b"\x01\x02\x03")
    with open(folder / "rank1.updates.bin", "ab") as file:
        file.write(b"\x01")
    assert len(read_times(folder, 1).updates) == NUM_UPDATES


def test_too_few_updates_are_refused_with_their_number(tmp_path: Path) -> None:
    """And so is a folder without any rank."""
    with pytest.raises(RecordError, match="no rank has recorded any"):
        read_profile(tmp_path)
    TimesWriter(tmp_path, 0).write_updates([(1, 0)])
    with pytest.raises(RecordError, match="1 on rank 0"):
        read_profile(tmp_path)


def test_one_rank_without_collectives_has_a_profile(tmp_path: Path) -> None:
    """Of one process: no waits, no straggler, no exposed communication."""
    writer = TimesWriter(tmp_path, 0)
    for update in range(NUM_UPDATES):
        begin = update * 10 * MS
        writer.write_spans([(begin, begin + 4 * MS, number("forward"), -1)])
        writer.write_updates([(begin + 10 * MS, 0)])
    profile = read_profile(tmp_path)
    assert profile.findings.items == ()
    assert profile.phases.share("other").mean() == pytest.approx(0.006)
    assert "samples/s" not in profile.headline


def test_the_report_is_one_file_without_network(folder: Path, tmp_path: Path) -> None:
    """No address but the name spaces of SVG; escaped title; small."""
    path = tmp_path / "profile.html"
    read_profile(folder).to_html(path, title="<train>.py")
    text = path.read_text("utf-8")
    assert "&lt;train&gt;.py" in text
    assert "http" not in text.replace("https://arxiv.org", "")
    assert "<script" not in text
    assert len(text) < 200_000


def test_threads_that_share_cores_are_named() -> None:
    """Ranks of this node that together have more threads than cores."""
    updates = numpy.array([(at * 10 * MS, 0) for at in range(1, 9)], dtype=[("end_ns", "<i8"), ("num_samples", "<i8")])
    facts: dict[str, Any] = {"num_threads": 8, "num_cores": 8, "local_world_size": 2, "uses_device": False}
    spans = numpy.zeros(0, dtype=[("begin_ns", "<i8"), ("end_ns", "<i8"), ("phase", "<i4"), ("site", "<i4")])
    times = [RankTimes(rank=rank, spans=spans, updates=updates, sites={}, facts=facts) for rank in (0, 1)]
    phases = divide_updates(times)
    assert phases is not None
    profile = Profile(phases=phases, judged=judge(phases, times))
    assert [each.code for each in profile.findings] == ["DDP804"]


def test_updates_that_torch_profiler_recorded_are_left_out(folder: Path) -> None:
    """They are marked by a number of samples below 0; all that come before are left out, too."""
    path = folder / "rank1.updates.bin"
    updates = numpy.frombuffer(path.read_bytes(), dtype=[("end_ns", "<i8"), ("num_samples", "<i8")]).copy()
    updates["num_samples"][4:7] = -1
    path.write_bytes(updates.tobytes())
    phases = phases_of(folder)
    assert phases.first_update == 9
    assert phases.seconds.shape[1] == NUM_UPDATES - 8
    assert (phases.num_samples == 8).all()


@pytest.mark.parametrize(("num_long", "is_later"), [(5, False), (5, True)])
def test_first_updates_that_compile_are_left_out(tmp_path: Path, num_long: int, is_later: bool) -> None:
    """As long as they are far longer than the later ones; a later one that is as long is not a first update."""
    writer, end = TimesWriter(tmp_path, 0), 0
    for update in range(40):
        end += (900 if update < num_long or (is_later and update == 30) else 10) * MS
        writer.write_updates([(end, 8)])
    phases = divide_updates([read_times(tmp_path, 0)])
    assert phases is not None
    assert phases.first_update == (NUM_WARM_UP + 2 if is_later else num_long + 1)


BACKWARD, COMMUNICATION = PHASES.index("backward"), PHASES.index("communication")


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
