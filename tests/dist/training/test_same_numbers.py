# SPDX-License-Identifier: Apache-2.0
"""The same numbers at 1, 2 and 4 ranks: the promise that everything else in this package serves."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.dist.training.bodies import KINDS, launch, train_all, train_seeds

IS_SOAK = bool(os.environ.get("DDPILOT_SOAK"))
NUM_UPDATES = 200 if IS_SOAK else 16
WORLD_SIZES = (1, 2, 4) if IS_SOAK else (1, 4)
NUM_SEEDS = 20
TIMEOUT_S = 1800 if IS_SOAK else 300
LEVEL = 0.01


@pytest.fixture(scope="module")
def learnt() -> dict[int, Any]:
    """What every rank knows, at each number of ranks."""
    num_updates = {torch.float64: NUM_UPDATES, torch.float32: 20}
    return {num: launch(num, train_all, num_updates) for num in WORLD_SIZES}


@pytest.mark.soak
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_same_numbers_at_any_world_size(kind: str, learnt: dict[int, Any]) -> None:
    """Ragged batches, short groups, unequal shares, clipping: losses, weights and metric agree to 1e-10 in float64."""
    expected = learnt[1][0][torch.float64][kind]
    assert expected["num_updates"] == NUM_UPDATES
    assert sum(expected["losses"][-10:]) < sum(expected["losses"][:10])
    for results in (learnt[num] for num in WORLD_SIZES[1:]):
        first = results[0][torch.float64][kind]
        for seen in (result[torch.float64][kind] for result in results):
            assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-10)
            assert seen["metric"] == pytest.approx(expected["metric"], rel=1e-10)
            assert (seen["num_updates"], seen["lr"]) == (NUM_UPDATES, expected["lr"])
            for name, weight in expected["weights"].items():
                distance = (seen["weights"][name] - weight).norm() / weight.norm()
                assert distance < 1e-10, f"{name} differs by {distance:.2e} on {len(results)} ranks"
            assert all(torch.equal(seen["weights"][n], w) for n, w in first["weights"].items())


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_agree_in_float32_over_the_first_20_updates(kind: str, learnt: dict[int, Any]) -> None:
    """To 1e-5; what comes later amplifies rounding, in any implementation."""
    alone, *others = (learnt[num][0][torch.float32][kind] for num in WORLD_SIZES)
    assert (alone["num_updates"], len(alone["losses"])) == (20, 50)
    for seen in others:
        assert seen["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-5)


@pytest.mark.soak
@pytest.mark.timeout(TIMEOUT_S)
def test_final_losses_with_dropout_do_not_depend_on_the_world_size() -> None:
    """Over 20 seeds, 1 and more ranks: neither means nor distributions differ; with another rate of dropout they do."""
    from scipy.stats import ks_2samp, ttest_rel  # takes half a second

    num_epochs, num_ranks = (20, 4) if IS_SOAK else (2, 2)
    alone, together = (launch(num, train_seeds, NUM_SEEDS, num_epochs)[0] for num in (1, num_ranks))
    assert alone != pytest.approx(together, rel=1e-3), "the masks are others on other ranks"
    assert ttest_rel(alone, together).pvalue > LEVEL
    assert ks_2samp(alone, together).pvalue > LEVEL
    (less,) = launch(1, train_seeds, NUM_SEEDS, num_epochs, 0.3)
    assert ttest_rel(alone, less).pvalue < LEVEL, "the comparison above would not have noticed much"
