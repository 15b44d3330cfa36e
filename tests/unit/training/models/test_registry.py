# SPDX-License-Identifier: Apache-2.0
"""The prepared models and optimizers of a loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpilot.training.models.registry import PreparedObjects

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


def make_optimizer(*models: nn.Module) -> torch.optim.SGD:
    """An optimizer of all parameters of `models`."""
    return torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)


def test_add_model_replaces_the_record_of_the_same_module() -> None:
    """The new record has the parameters that require a gradient now; what was known stays known."""
    prepared, model, other = PreparedObjects(), nn.Linear(1, 1), nn.Linear(1, 1)
    first = prepared.add_model(model)
    prepared.add_model(other)
    assert first.list_changed() == []
    model.bias.requires_grad_(False)
    assert first.list_changed() == ["bias"]
    second = prepared.add_model(model)
    assert [one.model for one in prepared.models] == [*prepared] == [other, model]
    assert prepared.find(model) is second
    assert [*second.trained] == ["weight"]
    assert prepared.find(nn.Linear(1, 1)) is None
    assert prepared.trained_ids == prepared.parameter_ids == {*map(id, [*model.parameters(), *other.parameters()])}


def test_gradients_of_shards_are_cleared_while_gathered_parameters_stand_in_the_module() -> None:
    """FSDP2 puts them there from the forward to the end of the backward pass."""
    prepared, model = PreparedObjects(), nn.Linear(1, 1)
    shard = model.weight
    added = prepared.add_model(model)
    gathered = model.weight = nn.Parameter(torch.zeros(1, 1))
    shard.grad, gathered.grad = torch.ones(1, 1), torch.ones(1, 1)
    added.clear_gradients()
    assert all(one.grad is None for one in (shard, gathered))


def test_an_optimizer_replaces_earlier_ones_whose_parameters_it_has() -> None:
    """In their place; several of one call stay side by side, and one that is prepared again counts again."""
    prepared, left, right = PreparedObjects(), nn.Linear(1, 1), nn.Linear(1, 1)
    parts = [make_optimizer(left), make_optimizer(right), make_optimizer(right)]
    for one in parts:
        prepared.add_optimizer(one)
        assert prepared.replace_optimizers((), one) == []
    both = make_optimizer(left, right)
    earlier = tuple(prepared.optimizers)
    prepared.add_optimizer(both)
    assert prepared.replace_optimizers(earlier, both) == parts
    assert prepared.optimizers == [both]
    assert all(one in prepared.replaced for one in parts)
    prepared.add_optimizer(parts[0])
    assert parts[0] not in prepared.replaced
    assert prepared.replace_optimizers((both,), parts[0]) == []
    assert prepared.optimizers == [both, parts[0]]


def test_the_record_of_an_optimizer_is_kept_until_its_parameters_or_the_models_change() -> None:
    """Also if a parameter is replaced in the list of its group, and for an optimizer that was not prepared."""
    prepared, left, right = PreparedObjects(), nn.Linear(1, 1), nn.Linear(1, 1)
    prepared.add_model(left)
    optimizer = make_optimizer(left)
    first = prepared.record_of(optimizer)
    assert (first.parameters, first.reduced, first.others) == ([*left.parameters()], [*left.parameters()], [])
    assert prepared.record_of(optimizer) is first
    optimizer.add_param_group({"params": [right.weight]})
    added = prepared.record_of(optimizer)
    assert (added.parameters[2:], added.reduced) == ([right.weight], first.parameters)
    optimizer.param_groups[1]["params"][0] = right.bias
    assert prepared.record_of(optimizer).parameters[2:] == [right.bias]
    prepared.add_model(right)
    assert prepared.record_of(optimizer).others == [right.weight]
