# SPDX-License-Identifier: Apache-2.0
"""How runs at several numbers of ranks become a table, a prediction and findings."""

from __future__ import annotations

from typing import Any

import numpy

from ddpilot.profiler.phases import SHARES, Phases
from ddpilot.profiler.pictures.scaling_page import COLORS
from ddpilot.profiler.result import Profile
from ddpilot.profiler.scaling.comparison import CAUSES, compare_sizes

NUM_UPDATES = 20


def profile(num_ranks: int, *, batch: int = 8, is_fair: bool = True, nnodes: int = 1, **means_ms: float) -> Profile:
    """A run whose updates all take these shares."""
    seconds = numpy.zeros((num_ranks, NUM_UPDATES, len(SHARES)))
    for name, mean_ms in means_ms.items():
        seconds[:, :, SHARES.index(name)] = mean_ms / 1e3
    facts: dict[str, Any] = {"world_size": num_ranks, "local_world_size": num_ranks // nnodes}
    facts |= {"buckets": [4_000_000]}
    if num_ranks > 1:
        seconds_of_large = 2 * (num_ranks - 1) * (0.0001 + 4_000_000 / num_ranks / 1e9)
        facts["all_reduce_s"] = [[8, 2 * (num_ranks - 1) * 0.0001], [4_000_000, seconds_of_large]]
    phases = Phases(
        ranks=tuple(range(num_ranks)),
        seconds=seconds,
        arrivals_s=numpy.zeros(seconds.shape[:2]),
        num_samples=numpy.full(seconds.shape[:2], batch),
        first_update=5,
        by_site={},
        overlaps=numpy.full((*seconds.shape[:2], 2), means_ms.get("backward", 0.0) / 2e3),
    )
    return Profile(phases=phases, judged=(), is_fair=is_fair, facts=(facts,) * num_ranks)


def test_weak_scaling_has_rows_a_check_and_a_prediction_of_twice_the_largest() -> None:
    """The last bucket takes 4.2 ms on two ranks, 6.6 on four, 8.4 on eight."""
    sizes = {
        1: [profile(1, forward=10, backward=20)],
        2: [profile(2, forward=10, backward=20, communication=4.2)],
        4: [profile(4, forward=10, backward=20, communication=6.6)],
    }
    found = compare_sizes("train.py", sizes)
    assert (found.kind, [row.num_ranks for row in found.rows]) == ("weak", [1, 2, 4])
    assert [row.num_ranks for row in found.predicted] == [8]
    assert abs(found.predicted[0].update_s - 0.0384) < 1e-4
    assert found.held_out is not None
    assert abs(found.held_out.error) < 0.01
    text = str(found)
    assert "check: fitted at 1 and 2 ranks, the model predicts 36.6 ms at 4 ranks, measured 36.6 ms: 0% off" in text
    assert "(predicted)" in text
    assert "85-95%" in text
    assert "18% exposed communication" in text
    assert not found.findings
    assert found.to_dict()["held_out"]["num_ranks"] == 4


def test_predicted_numbers_can_be_chosen() -> None:
    """None, or those that were not measured."""
    sizes = {1: [profile(1, forward=10)], 2: [profile(2, forward=10)]}
    assert compare_sizes("train.py", sizes, []).predicted == ()
    assert [row.num_ranks for row in compare_sizes("train.py", sizes, [16, 2, 8]).predicted] == [8, 16]


def test_what_is_lost_has_a_cause() -> None:
    """Less work a rank in strong scaling, more for the same work in weak scaling, waiting, and the loader."""
    strong = {1: [profile(1, batch=16, forward=20)], 2: [profile(2, batch=8, forward=15, waiting=5)]}
    found = compare_sizes("train.py", strong)
    assert found.kind == "strong"
    assert {name: round(share, 2) for name, share in found.rows[1].lost.items()} == {
        "smaller batch per rank": 0.25,
        "stragglers and barriers": 0.25,
    }
    weak = {1: [profile(1, forward=20)], 2: [profile(2, forward=25, data=5)]}
    assert set(compare_sizes("train.py", weak).rows[1].lost) == {"cores and memory shared on this machine", "loader"}


def test_a_model_that_is_too_small_gains_nothing_and_the_batch_that_would_is_said() -> None:
    """One update of 2 ms of work waits 4.2 ms for gradients."""
    sizes = {1: [profile(1, forward=2)], 2: [profile(2, forward=2, communication=4.2)]}
    found = compare_sizes("train.py", sizes)
    by_code = {each.code: each for each in found.findings}
    assert by_code["DDP727"].summary.startswith("no gain expected from more ranks: 2 are 0.65 times as fast as 1")
    assert (
        "2 ranks are faster from 21 samples of a rank on, and 80% efficient from 68 on (now 8)" in by_code["DDP727"].fix
    )
    assert "DDP726" in by_code


def test_ranks_that_share_cores_are_no_fair_test() -> None:
    """It is said in the row, the check and the finding, which does not warn."""
    sizes = {
        1: [profile(1, forward=10)],
        2: [profile(2, forward=20, is_fair=False)],
    }
    found = compare_sizes("train.py", sizes)
    assert "(ranks share cores)" in str(found)
    assert "predicted for a machine with a core or GPU for each rank" in str(found)
    assert {each.code: each.severity for each in found.findings} == {"DDP726": "info"}


def test_the_link_between_nodes_is_what_the_exchange_takes_beyond_that_of_one_node() -> None:
    """Four ranks of one node would take 6.6 ms; on two nodes they take 16.6."""
    sizes = {
        1: [profile(1, forward=10, backward=20)],
        2: [profile(2, forward=10, backward=20, communication=4.2)],
        4: [profile(4, nnodes=2, forward=10, backward=20, communication=16.6)],
    }
    lost = compare_sizes("train.py", sizes).rows[2].lost
    assert round(lost["inter-node link"] * 46.6, 1) == 10.0
    assert round(lost["exposed communication"] * 46.6, 1) == 6.6


def test_every_cause_has_a_color() -> None:
    """In the pictures, which also have the check of the model."""
    assert set(COLORS) >= CAUSES
    found = compare_sizes("train.py", {1: [profile(1, forward=10)], 2: [profile(2, forward=10)]})
    assert "check: fitted at 1 rank" in found._repr_html_()
