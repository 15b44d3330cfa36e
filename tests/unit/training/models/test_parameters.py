# SPDX-License-Identifier: Apache-2.0
"""Counting, freezing and unfreezing by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpilot.errors import LoopError
from ddpilot.training.models.parameters import count_parameters, freeze, unfreeze

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


def make() -> nn.Module:
    """Layers with names, a BatchNorm and a weight that two layers share."""
    model = nn.Module()
    model.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model.head = nn.Linear(4, 2, bias=False)
    model.tied = nn.Linear(4, 2, bias=False)
    model.tied.weight = model.head.weight
    return model


def test_count_parameters_counts_what_is_shared_once() -> None:
    """By hand: 16 + 8 + 20 + 8, and the three buffers of BatchNorm (4 + 4 floats and an integer of 8 bytes)."""
    model = make()
    freeze(model, "encoder.0")
    count = count_parameters(model)
    assert (count.total, count.trainable, count.frozen) == (52, 36, 16)
    assert (count.parameter_bytes, count.buffer_bytes) == (208, 40)
    assert str(count) == "52 parameters (36 trained, 16 frozen), 0.0 MB"
    assert str(count_parameters(nn.Linear(1999, 1000))) == "2,000,000 parameters (2,000,000 trained), 8.0 MB"


def test_count_parameters_refuses_a_lazy_layer() -> None:
    """torch's own error names neither the layer nor what to do."""
    with pytest.raises(LoopError, match="0.weight, 0.bias have no shape yet. Run one batch"):
        count_parameters(nn.Sequential(nn.LazyLinear(2)))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("head",), ["head.weight"]),
        (("encoder.[01]",), ["encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias"]),
        (("encoder.?.bias", "tied.weight"), ["encoder.0.bias", "encoder.1.bias", "encoder.2.bias", "tied.weight"]),
    ],
)
def test_freeze_takes_layers_parameters_and_wildcards(patterns: tuple[str, ...], expected: list[str]) -> None:
    """In the order of the model; unfreeze is the way back."""
    model = make()
    assert freeze(model, *patterns) == expected
    named = dict(model.named_parameters(remove_duplicate=False))
    assert {name for name in expected if named[name].requires_grad} == set()
    assert unfreeze(model, *patterns) == expected
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_freeze_takes_everything_when_there_is_no_pattern() -> None:
    """A feature extractor."""
    assert len(freeze(model := make())) == 8
    assert count_parameters(model).trainable == 0


def test_freeze_changes_nothing_when_a_pattern_matches_nothing() -> None:
    """Near names are listed: a misspelt one would have trained what was to stay."""
    model = make()
    with pytest.raises(LoopError, match="no parameter or layer is called 'encodr'. Similar names are 'encoder'"):
        freeze(model, "head", "encodr")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_freeze_keeps_weights_from_an_optimizer_that_holds_them() -> None:
    """Their gradients are dropped, so neither momentum nor weight decay moves them; the others go on."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    freeze(model, "0")
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]
