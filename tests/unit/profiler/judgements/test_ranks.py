# SPDX-License-Identifier: Apache-2.0
"""Ranks that the others wait for, and batches of unequal contents."""

from __future__ import annotations

import pytest

from tests.unit.profiler.made_times import LINE, judge_codes, judge_times, make_times

SHORT, LONG = (4, 12, 8, 4, 12, 8), (12, 4, 8, 8, 4, 12)


def test_a_rank_that_computes_longer_is_named_with_its_line() -> None:
    """With elements as many as on the other: the rank is slower."""
    sites = {"forward": 0}
    quick = make_times(0, {"forward": 5, "backward": 5, "communication": 11}, sites=sites, num_elements=100)
    slow = make_times(1, {"forward": 10, "backward": 10, "communication": 1}, sites=sites, num_elements=100)
    first = judge_times(quick, slow)[0]
    assert (first.finding.code, first.finding.ranks, first.finding.place) == ("DDP722", (1,), LINE)
    assert "in the forward and the backward pass" in first.finding.summary
    assert any("as many elements" in line for line in first.finding.evidence)
    assert 21 / 12 < first.factor < 2.2


def test_a_rank_whose_batches_are_larger_is_not_called_slow() -> None:
    """Its batches are named."""
    quick = make_times(0, {"forward": 5, "backward": 5, "communication": 11}, num_elements=[100, 110])
    slow = make_times(1, {"forward": 10, "backward": 10, "communication": 1}, num_elements=[200, 220])
    first = judge_times(quick, slow)[0].finding
    assert (first.code, first.ranks) == ("DDP748", (1,))
    assert "rank 1's batches have 2 times as many elements" in first.summary


def test_batches_that_differ_in_turn_are_named_without_a_rank() -> None:
    """In each update a different rank has the longer one; the wait is until the longer one has ended."""
    times = [
        make_times(
            rank,
            {
                "forward": own,
                "communication": [max(0, theirs - each) + 1 for each, theirs in zip(own, other, strict=True)],
            },
            num_elements=[100 * each for each in own],
        )
        for rank, (own, other) in enumerate([(SHORT, LONG), (LONG, SHORT)])
    ]
    first = judge_times(*times)[0].finding
    assert (first.code, first.ranks) == ("DDP748", ())


@pytest.mark.parametrize("wait_ms", [4, 1])
def test_lateness_below_the_wait_for_cores_is_noise(wait_ms: int) -> None:
    """Other processes make a rank late, also where they run on its core alone; that is said, and nothing else."""
    times = [
        make_times(0, {"forward": 20, "communication": 4}, core_wait_ns=wait_ms * 1_000_000),
        make_times(1, {"forward": 23, "communication": 1}, core_wait_ns=4_000_000),
    ]
    assert judge_codes(*times) == ["DDP751"]
    assert [each.finding.severity for each in judge_times(*times)] == ["info"]


def test_a_rank_that_is_late_by_chance_is_not_a_straggler() -> None:
    """In half of the updates, by half of their time."""
    even, odd = (10, 20), (20, 10)
    times = [
        make_times(0, {"forward": even, "communication": [11, 1]}),
        make_times(1, {"forward": odd, "communication": [1, 11]}),
    ]
    assert judge_codes(*times) == []


def test_a_rank_that_runs_out_of_batches_is_named() -> None:
    """In one of three updates it shadows the other rank, whose time is 6 ms more than it need be."""
    early = make_times(1, {"forward": [18, 18, 0], "shadow": [0, 0, 18]})
    found = judge_times(make_times(0, {"forward": 18}), early)[0]
    assert (found.finding.code, found.finding.ranks) == ("DDP754", (1,))
    assert "for 35% of the time" in found.finding.summary or "for 30% of the time" in found.finding.summary
    assert "it has batches in 1" in found.finding.evidence[0]
    assert found.factor == pytest.approx(1.2, abs=0.03)
