# SPDX-License-Identifier: Apache-2.0
"""What happens on the host: reads of values, lines that save, collectives of a line, threads."""

from __future__ import annotations

import pytest

from tests.unit.profiler.made_times import LINE, judge_codes, judge_times, make_times


def test_a_wait_for_a_device_costs_what_the_host_does_meanwhile_at_most() -> None:
    """16 of 20 ms are waited for the device, which then waits 4 ms for the host."""
    facts = {"uses_device": True}
    times = [make_times(rank, {"forward": 4, "sync": 16}, facts=facts, sites={"sync": 0}) for rank in (0, 1)]
    found = judge_times(*times)[0]
    assert (found.finding.code, found.finding.place, found.finding.severity) == ("DDP741", LINE, "warning")
    assert found.factor == pytest.approx(20 / 16)


def test_reads_on_the_cpu_are_named_where_their_time_is_notable() -> None:
    """A thousand reads of 2 us in an update of 20 ms, or one."""
    for calls, codes in ((1000, ["DDP741"]), (1, [])):
        facts = {"short_reads": [[0, 24 * calls, 24 * calls * 2000]]}
        times = [make_times(rank, {"forward": 20}, facts=facts) for rank in (0, 1)]
        assert judge_codes(*times) == codes


def test_a_line_that_saves_is_named_with_its_rank_and_not_called_a_straggler() -> None:
    """The other rank waits for rank 0."""
    saving = make_times(0, {"checkpoint": 10, "forward": 20, "communication": 1}, sites={"checkpoint": 0})
    waiting = make_times(1, {"forward": 20, "communication": 11})
    found = judge_times(saving, waiting)
    assert [each.finding.code for each in found] == ["DDP725"]
    assert (found[0].finding.ranks, found[0].finding.place) == ((0,), LINE)


def test_the_wait_in_a_collective_belongs_to_the_rank_that_is_late() -> None:
    """10 of 11 ms in the line of rank 0 are waiting for rank 1."""
    sites = {"communication": 0}
    early = make_times(0, {"forward": 10, "communication": 11}, sites=sites)
    late = make_times(1, {"forward": 20, "communication": 1}, sites=sites)
    assert judge_codes(early, late) == ["DDP722"]


def test_threads_are_judged_by_the_wait_for_a_core() -> None:
    """40 % of the time comes first, 2 % is an info."""
    for share, severity in ((0.4, "warning"), (0.02, "info")):
        facts = {"num_threads": 8, "num_cores": 2, "core_wait_share": share}
        found = judge_times(*(make_times(rank, {"forward": 20}, facts=facts) for rank in (0, 1)))
        assert [(each.finding.code, each.finding.severity) for each in found] == [("DDP804", severity)]
        assert found[0].factor == pytest.approx(1 / (1 - share))


def test_evaluation_and_data_parallel_are_said() -> None:
    """The one with its share, the other with its line."""
    facts = {"data_parallel": [4, 0]}
    found = judge_times(*(make_times(rank, {"forward": 20, "evaluation": 5}, facts=facts) for rank in (0, 1)))
    assert [each.finding.code for each in found] == ["DDP749", "DDP750"]
    assert found[0].finding.severity == "info"
    assert found[1].finding.place == LINE


@pytest.mark.parametrize(
    ("waits_ms", "code"),
    [([40, 0, 0, 0], "DDP721"), ([10, 10, 10, 10], "DDP721"), ([120, *[0] * 11], "DDP753")],
)
def test_workers_that_are_slow_now_and_then_need_a_longer_queue(waits_ms: list[float], code: str) -> None:
    """A queue of 4 batches is empty in each group of 4 updates, or in one of three: 10 of 30 ms in all cases."""
    facts = {"num_workers": 2, "loader": {"pin_memory": True, "prefetch_factor": 2}}
    times = [make_times(rank, {"data": waits_ms, "forward": 20}, facts=facts) for rank in (0, 1)]
    found = judge_times(*times)[0].finding
    assert found.code == code
    assert ("queue of 4 batches" in found.summary) == (code == "DDP753")


def test_copies_from_memory_that_is_not_pinned_are_named_on_a_device() -> None:
    """3 of 20 ms; not with pinned memory, and not on the CPU."""
    for uses_device, pins, codes in ((True, False, ["DDP752"]), (True, True, []), (False, False, [])):
        facts = {"uses_device": uses_device, "num_workers": 0, "loader": {"pin_memory": pins}}
        times = [make_times(rank, {"copy": 3, "forward": 17}, facts=facts) for rank in (0, 1)]
        assert judge_codes(*times) == codes
