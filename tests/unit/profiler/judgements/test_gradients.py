# SPDX-License-Identifier: Apache-2.0
"""What the exchange of gradients is judged by."""

from __future__ import annotations

from typing import Any

import pytest

from ddpilot.profiler.spans_file import SYNC_BATCH_NORM, RankTimes
from tests.unit.profiler.made_times import DDP, LINE, judge_times, make_times


def both(lengths_ms: dict[str, float], *, num_unused: int = 0, **options: Any) -> list[RankTimes]:
    """Two equal ranks with these options of DDP, or counts."""
    counts = {name: options.pop(name) for name in ("num_reductions", "search_ns") if name in options}
    facts = {"ddp": {**DDP, **options}, "num_unused_parameters": num_unused}
    sites = {"backward": 0}
    return [make_times(rank, lengths_ms, facts=facts, sites=sites, **counts) for rank in (0, 1)]


def test_a_search_that_finds_nothing_is_named_with_its_measured_cost() -> None:
    """2 of 20 ms are a warning, 0.2 an info; a search that finds something is needed."""
    lengths = {"forward": 10.0, "backward": 10.0}
    found = judge_times(*both(lengths, find_unused_parameters=True, search_ns=2_000_000))[0]
    assert (found.finding.code, found.finding.place, found.finding.severity) == ("DDP742", LINE, "warning")
    assert found.factor == pytest.approx(20 / 18)
    found = judge_times(*both(lengths, find_unused_parameters=True, search_ns=200_000))[0]
    assert (found.finding.code, found.finding.severity) == ("DDP742", "info")
    assert not judge_times(*both(lengths, num_unused=1, find_unused_parameters=True, search_ns=2_000_000))


def test_many_small_buckets_are_named_instead_of_the_exchange() -> None:
    """One bucket would do."""
    found = judge_times(*both({"forward": 10, "backward": 10, "communication": 10}, num_buckets=50, bucket_cap_mb=0.1))
    assert [each.finding.code for each in found] == ["DDP743"]
    assert found[0].finding.place == LINE


def test_a_slow_link_is_told_from_a_small_batch() -> None:
    """4 MB need about 9 ms at most: 40 ms are a slow link, 6 ms next to 3 of computation a small batch."""
    slow = judge_times(*both({"forward": 10, "backward": 20, "communication": 40}))
    assert [each.finding.code for each in slow] == ["DDP723"]
    assert "over a slow link" in slow[0].finding.summary
    small = judge_times(*both({"forward": 1, "backward": 2, "communication": 6, "optimizer": 1}))
    assert [each.finding.code for each in small] == ["DDP747"]
    assert "from about 64 samples on each rank" in " ".join(small[0].finding.evidence)


def test_gradients_that_are_exchanged_in_each_pass_are_counted() -> None:
    """Of four exchanges three are not needed."""
    found = judge_times(*both({"forward": 10, "backward": 20, "communication": 8}, num_reductions=4))
    assert (found[0].finding.code, found[0].finding.place) == ("DDP746", LINE)
    assert found[0].factor == pytest.approx(38 / 32)


def test_copies_are_an_estimate_and_no_warning() -> None:
    """100 MB, twice."""
    found = judge_times(*both({"forward": 50, "backward": 100}, parameter_bytes=10**8, gradient_as_bucket_view=False))
    assert [(each.finding.code, each.finding.severity) for each in found] == [("DDP744", "info")]


def test_statistics_of_norms_are_not_a_line_of_the_program() -> None:
    """The collectives of SyncBatchNorm have a line that stands for them."""
    facts = {"ddp": {**DDP, "num_sync_batch_norms": 5}}
    times = []
    for rank in (0, 1):
        lengths = {"forward": 10, "communication": 5, "backward": 10}
        made = make_times(rank, lengths, facts=facts, sites={"communication": 0})
        times.append(RankTimes(**{**vars(made), "sites": {0: SYNC_BATCH_NORM}}))
    found = judge_times(*times)
    assert [each.finding.code for each in found] == ["DDP745"]
    assert "5 layers" in found[0].finding.evidence[0]
