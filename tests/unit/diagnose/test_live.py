# SPDX-License-Identifier: Apache-2.0
"""Judging what ranks reported: joining, values, threads and speed. Reports of real ranks are in tests/dist/diagnose."""

from __future__ import annotations

from typing import Any

from ddpilot.diagnose.checks import live
from ddpilot.findings.catalog import make_finding
from tests.unit.diagnose.checking import make_facts, make_report, statuses, text_of

GB = 1e9


def times(rate: float) -> tuple[tuple[int, float], ...]:
    """Times of a small message, and of 4 MB at `rate` bytes per second."""
    return ((8, 1e-4), (4_000_000, 4e6 / rate))


def pair(rate: float, **given: Any) -> Any:
    """Two ranks that exchange `rate` bytes per second."""
    return make_facts(ranks=(make_report(0, pair_times=((1, times(rate)),), **given), make_report(1, **given)))


def test_joined_says_how_fast_or_why_not() -> None:
    """All ranks; a launch that failed; ranks that are missing, named once; a rank without a report."""
    assert text_of(live.joined, make_facts(ranks=(make_report(0), make_report(1)))) == (
        "2 ranks joined in 0.0 s on cpu over gloo"
    )
    assert statuses(live.joined, make_facts(live_failure=make_finding("DDP702"))) == ["error DDP702"]
    failure = {"did": "waiting for all 3 ranks", "found": "rank 2 did not join", "fix": "Look.", "missing": [2]}
    both = tuple(make_report(rank, 3, failure=failure) for rank in range(2))
    assert statuses(live.joined, make_facts(ranks=both)) == ["error DDP105"]
    assert statuses(live.joined, make_facts(ranks=(make_report(0),))) == ["error DDP105"]
    assert "rank 1 did not report" in text_of(live.joined, make_facts(ranks=(make_report(0),)))
    assert statuses(live.joined, make_facts()) == []
    apart = make_facts(ranks=(make_report(0, backend=""), make_report(1, backend="")))
    assert statuses(live.joined, apart) == ["info DDP105"]
    assert statuses(live.values, apart) == []


def test_joined_looks_up_the_page_of_an_error_of_torch() -> None:
    """The same error of several ranks is one finding."""
    failure = {"did": "calling collectives", "found": "RuntimeError: Gloo connectFullMesh failed with", "fix": ""}
    reports = tuple(make_report(rank, failure={**failure, "missing": []}) for rank in range(2))
    assert statuses(live.joined, make_facts(ranks=reports)) == ["error DDP106"]


def test_values_names_ranks_with_wrong_sums() -> None:
    """With what they got and should have got."""
    wrong = (make_report(0), make_report(1, wrong=("all_reduce of 1 numbers: 2, not 3",)))
    assert statuses(live.values, make_facts(ranks=wrong)) == ["error DDP808"]
    assert "rank 1: all_reduce of 1 numbers: 2, not 3" in text_of(live.values, make_facts(ranks=wrong))
    assert statuses(live.values, make_facts(ranks=(make_report(0), make_report(1)))) == ["ok"]


def test_threads_of_a_nodes_ranks_are_added() -> None:
    """Two ranks that use all 8 cores each are too many, as srun starts them."""
    assert statuses(live.threads, make_facts(ranks=(make_report(0), make_report(1)))) == ["ok"]
    many = make_facts(ranks=tuple(make_report(rank, num_threads=8) for rank in range(2)))
    assert statuses(live.threads, many) == ["warning DDP804"]
    assert "`export OMP_NUM_THREADS=4`" in text_of(live.threads, many)


def test_all_reduce_is_judged_by_its_link() -> None:
    """16 MB in 20 ms are 0.8 GB/s: enough for loopback and 10 Gb/s, too slow for NVLink, not judged if unknown."""
    measured = ((8, 1e-4), (16_000_000, 0.02))

    def facts(**given: Any) -> Any:
        return make_facts(ranks=tuple(make_report(rank, group_times=measured, **given) for rank in range(2)))

    assert statuses(live.all_reduce_speed, facts()) == ["ok"]
    said = text_of(live.all_reduce_speed, facts())
    assert "8 B 0.10 ms, 16.0 MB 20.00 ms: 800.0 MB/s over loopback; gradients of 100 M parameters take 0.5 s" in said
    assert statuses(live.all_reduce_speed, facts(link="eth0", link_bytes_per_s=1.25 * GB)) == ["ok"]
    assert statuses(live.all_reduce_speed, facts(link="NVLink", link_bytes_per_s=450 * GB)) == ["warning DDP807"]
    unknown = facts(link="eth0")
    assert statuses(live.all_reduce_speed, unknown) == ["ok"]
    assert "the speed of eth0 is not known, so this is not judged" in text_of(live.all_reduce_speed, unknown)
    assert statuses(live.all_reduce_speed, make_facts(ranks=(make_report(0, 1),))) == []


def test_pairs_are_judged_by_their_link_and_by_the_other_pairs() -> None:
    """A slow loopback; one slow pair of six, by its ranks and host."""
    assert statuses(live.pair_speed, pair(0.5 * GB)) == ["ok"]
    assert "one way: 0-1 8 B 0.10 ms, 4.0 MB 8.00 ms (500.0 MB/s)" in text_of(live.pair_speed, pair(0.5 * GB))
    assert statuses(live.pair_speed, pair(0.01 * GB)) == ["warning DDP807"]
    rates = {(a, b): 1.0 for a in range(4) for b in range(a + 1, 4)} | {(1, 3): 0.2}
    ranks = [
        make_report(a, 4, pair_times=tuple((b, times(rate * GB)) for (first, b), rate in rates.items() if first == a))
        for a in range(4)
    ]
    found = make_facts(ranks=tuple(ranks))
    assert statuses(live.pair_speed, found) == ["warning DDP807"]
    assert text_of(live.pair_speed, found).startswith("ranks 1-3 exchange data at under 40% of the median of 1.0 GB/s")
