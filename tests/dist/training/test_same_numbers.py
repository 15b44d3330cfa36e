# SPDX-License-Identifier: Apache-2.0
"""The same numbers at 1, 2 and 4 ranks: the promise that everything else in this package serves."""

from __future__ import annotations

import os

import pytest
import torch

from tests.dist.training.bodies import launch, train

UPDATES_PER_EPOCH = 4
NUM_UPDATES = 200 if os.environ.get("DDPILOT_SOAK") else 24
SHARES = {2: [2.0, 1.0], 4: [3.0, 1.0, 2.0, 1.0]}


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "gpt"])
def test_training_gives_the_same_numbers_at_any_world_size(kind: str) -> None:
    """Ragged batches, short groups, unequal shares, clipping: losses, weights and metric agree to 1e-10 in float64."""
    alone, *others = (launch(num, train, kind, NUM_UPDATES // UPDATES_PER_EPOCH, SHARES) for num in (1, 2, 4))
    expected = alone[0]
    assert expected["num_updates"] == NUM_UPDATES
    assert sum(expected["losses"][-10:]) < sum(expected["losses"][:10])
    for results in others:
        for learnt in results:
            assert learnt["losses"] == pytest.approx(expected["losses"], rel=1e-10)
            assert learnt["metric"] == pytest.approx(expected["metric"], rel=1e-10)
            assert (learnt["num_updates"], learnt["lr"]) == (NUM_UPDATES, expected["lr"])
            for name, weight in expected["weights"].items():
                distance = (learnt["weights"][name] - weight).norm() / weight.norm()
                assert distance < 1e-10, f"{name} differs by {distance:.2e} on {len(results)} ranks"
            assert all(torch.equal(learnt["weights"][n], w) for n, w in results[0]["weights"].items())
