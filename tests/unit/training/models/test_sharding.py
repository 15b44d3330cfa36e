# SPDX-License-Identifier: Apache-2.0
"""Which layers are gathered one at a time, and what cannot be sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpilot import FakeGroup, Loop
from ddpilot.errors import LoopError
from ddpilot.training.models.sharding import ParameterSharding, choose_layers, is_sharded
from ddpilot.training.models.strategy import ParallelStrategy, strategy_of


class Tied(nn.Module):
    """A tied embedding and head around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.tokens.weight


def test_layers_are_chosen_by_class_or_by_size_and_never_apart_from_a_parameter_that_they_share() -> None:
    """Containers without `forward` and tied layers are left to the model around them."""
    model = Tied()
    blocks = list(model.blocks)
    assert choose_layers(model, ParameterSharding(layers=nn.Sequential)) == blocks
    assert choose_layers(model, ParameterSharding(layers=(nn.Embedding, nn.Linear))) == [
        layer for block in model.blocks for layer in block.children()
    ]
    assert choose_layers(model, ParameterSharding(min_parameters=21)) == blocks
    assert len(choose_layers(model, ParameterSharding(min_parameters=20))) == 4
    assert choose_layers(model, ParameterSharding()) == []


def test_strategy_of_a_plain_model_runs_alone() -> None:
    """It needs no other rank, and loads its own weights."""
    model = nn.Linear(2, 1)
    strategy = strategy_of(model)
    assert type(strategy) is ParallelStrategy
    assert not strategy.forward_is_collective
    assert not is_sharded(model)
    strategy.load_weights({name: torch.ones_like(one) for name, one in strategy.weights(keeps=True).items()})
    assert bool((model.weight == 1).all())


def test_a_parameter_without_dimensions_is_refused_on_one_rank_too() -> None:
    """`fully_shard` refuses it only on several."""
    model = nn.Linear(2, 1)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(LoopError, match=r"without dimensions \(scale\)"):
        Loop(group=FakeGroup(), progress=False).prepare(model, shard="parameters")
