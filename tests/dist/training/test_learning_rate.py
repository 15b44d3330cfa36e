# SPDX-License-Identifier: Apache-2.0
"""The search for a learning rate on 1 and 3 ranks: the same losses and the same suggestion on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpilot
from ddpilot.training.loop import Loop
from tests.dist.training.bodies import launch


def body() -> tuple[ddpilot.LearningRateSearch, ddpilot.LearningRateSearch]:
    """By Loop with a prepared model, and by Trainer; batches of five samples, of which one rank of three has one."""
    x = torch.linspace(-1, 1, 42, dtype=torch.float64).reshape(14, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())

    def step(model: Any, batch: Any) -> tuple[torch.Tensor, float]:
        return nn.functional.mse_loss(model(batch[0]), batch[1]), float(len(batch[0]))

    loop = Loop(seed=1, progress=False)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = loop.prepare(model, optimizer)
    before = [one.clone() for one in model.parameters()]
    loader = loop.loader(data, global_batch_size=5, shuffle=True)
    given: dict[str, Any] = {"min_lr": 1e-3, "max_lr": 100.0, "num_updates": 40}
    found = ddpilot.find_learning_rate(loop, prepared, optimizer, loader, step, **given)
    assert all(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    trainer = ddpilot.Trainer(other, nn.functional.mse_loss, torch.optim.SGD(other.parameters(), lr=0.1), accumulate=2)
    return found, trainer.find_learning_rate(data, global_batch_size=3, **given)


def test_a_learning_rate_is_the_same_on_all_ranks() -> None:
    """And the losses are those of one process."""
    (alone,), three = launch(1, body), launch(3, body)
    assert three[0] == three[1] == three[2]
    for found, expected in zip(three[0], alone, strict=True):
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert found.lr == expected.lr
