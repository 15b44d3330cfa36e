# SPDX-License-Identifier: Apache-2.0
"""Layers that are frozen, before DDP and in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot.errors import LoopError
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.parameters import freeze, unfreeze
from tests.dist.training.bodies import launch


def train_frozen() -> dict[str, Any]:
    """Train with a frozen layer, then with another one, then freeze one that is in DDP."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=2)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    freeze(model, "0")
    wrapped, optimizer = loop.prepare(model, optimizer)
    loader = loop.loader(TensorDataset(torch.arange(22.0).reshape(11, 2)), global_batch_size=4)

    def train_epoch(module: nn.Module) -> list[list[float]]:
        for (x,) in loop.batches(loader):
            with loop.accumulate(module):
                loop.backward(module(x).square().mean())
            loop.step(optimizer)
        return [weight.flatten().tolist() for weight in unwrap(module).parameters()]

    seen = [[weight.flatten().tolist() for weight in model.parameters()], train_epoch(wrapped)]
    unfreeze(model, "0")
    freeze(model, "2.weight")
    wrapped = loop.prepare(model)
    seen.append(train_epoch(wrapped))
    refusals = []
    for module in (wrapped, model):
        try:
            freeze(module, "0")
            train_epoch(wrapped)
        except LoopError as error:
            refusals.append(str(error))
    return {"seen": seen, "refusals": refusals}


def prepare_what_was_trained_apart() -> list[list[float]]:
    """Train on each rank alone, with its own numbers, then prepare and make an update."""
    loop = Loop(seed=2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (loop.rank + 1))
    for _ in range(loop.rank + 1):
        model(torch.full((1, 2), loop.rank + 1.0)).square().sum().backward()
        optimizer.step()
    model, optimizer = loop.prepare(model, optimizer)
    for (x,) in loop.batches(loop.loader(TensorDataset(torch.arange(8.0).reshape(4, 2)), global_batch_size=4)):
        loop.backward(model(x).square().mean())
        loop.step(optimizer)
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [one.flatten().tolist() for one in (*model.parameters(), *values)]


def test_prepare_gives_all_ranks_the_weights_and_the_optimizer_of_rank_0() -> None:
    """With weights alone, as DDP does it, the first update would make the ranks' models different."""
    zero, one = launch(2, prepare_what_was_trained_apart)
    assert zero == one


def test_freeze_keeps_layers_out_of_ddp_and_the_optimizer() -> None:
    """What is frozen does not move, what is not does, alike on 1 and 2 ranks; frozen in DDP, it is refused."""
    (alone,), (zero, one) = launch(1, train_frozen), launch(2, train_frozen)
    start, first, second = zero["seen"]
    assert [old == new for old, new in zip(start, first, strict=True)] == [True, True, False, False]
    assert [old == new for old, new in zip(first, second, strict=True)] == [False, False, True, False]
    assert zero["seen"] == one["seen"]
    assert torch.cat([torch.tensor(row) for row in second]).tolist() == pytest.approx(
        torch.cat([torch.tensor(row) for row in alone["seen"][-1]]).tolist(), rel=1e-12
    )
    assert "the model is in DDP, which has determined already" in zero["refusals"][0]
    for found in (zero["refusals"], one["refusals"], alone["refusals"]):
        assert "0.bias, 0.weight were frozen or unfrozen after prepare(), which DDP does not support" in found[-1]
