# SPDX-License-Identifier: Apache-2.0
"""What one rank's backward pass computed is kept for a while, next to the input, and goes with the loop."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch
from torch import nn

from ddpilot.training.batches import CurrentBatch
from ddpilot.training.checks.tapping import Taps


def batch(index: int) -> CurrentBatch:
    """One that is an update by itself."""
    ids = np.array([index, index + 100])
    return CurrentBatch(None, 0, index, 2, 2, ids, 2, 1, is_first=True, is_last=True)


def is_finite(tensor: torch.Tensor) -> bool:
    """Every element?"""
    return bool(torch.isfinite(tensor).all())


def watched(width: int = 3) -> tuple[Taps, nn.Linear]:
    """A layer whose smaller parameter, the bias, is watched."""
    taps, layer = Taps(), nn.Linear(2, width)
    taps.watch(layer, layer.parameters())
    return taps, layer


def run(taps: Taps, layer: nn.Linear, index: int, factor: float) -> None:
    """A backward pass of a batch."""
    taps.begin(batch(index))
    (layer(torch.ones(2, 2)).sum() * factor).backward()


@pytest.mark.parametrize("width", [3, 5000])
def test_the_first_bad_gradient_is_found_with_its_batch(width: int) -> None:
    """Also one of many elements; of batches before a given one where there is such a one."""
    taps, layer = watched(width)
    for index, factor in enumerate([1.0, math.nan, math.inf, 1.0]):
        run(taps, layer, index, factor)
    found = taps.find(is_finite, None)
    assert found is not None
    assert (*found[:2], found[2].tolist()) == (0, 1, [1, 101])
    assert taps.find(is_finite, (0, 1)) == found
    taps.forget()
    assert taps.find(is_finite, None) is None


class Scaled(nn.Module):
    """Its first parameter is the last one on the way to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 2)."""
        return torch.as_tensor(self.layers(x) * self.scale)


def test_the_parameter_next_to_the_input_is_watched_wherever_it_stands() -> None:
    """A scale that comes first by name, and a smaller bias of the next layer, see nothing of what is before them."""
    taps, model = Taps(), Scaled()
    taps.watch(model, model.parameters())
    for index in range(2):
        taps.begin(batch(index))
        model(torch.ones(2, 2)).sum().backward()
    assert [name for name, one in model.named_parameters() if one._backward_hooks] == ["layers.0.bias"]


def test_what_the_sum_makes_of_a_gradient_is_not_what_is_kept() -> None:
    """DDP writes the mean of all ranks into the gradient afterwards."""
    taps, layer = watched()
    run(taps, layer, 0, 1.0)
    assert layer.bias.grad is not None
    layer.bias.grad.fill_(math.nan)
    assert taps.find(is_finite, None) is None


def test_backward_passes_without_samples_or_batch_count_for_nothing() -> None:
    """The mean of no samples is NaN."""
    taps, layer = watched()
    run(taps, layer, 0, 1.0)
    taps.pause()
    (layer(torch.ones(2, 2)).sum() * math.nan).backward()
    taps.begin(None)
    (layer(torch.ones(2, 2)).sum() * math.nan).backward()
    assert taps.find(is_finite, None) is None


def test_a_module_has_one_hook_however_often_it_is_watched_and_none_after_the_loop() -> None:
    """Loops that are made one after the other leave nothing behind on the parameters."""
    taps, layer = watched()
    taps.watch(layer, layer.parameters())
    for index in range(2):
        run(taps, layer, index, 1.0)
    assert [len(parameter._backward_hooks) for parameter in layer.parameters()] == [0, 1]  # type: ignore[arg-type]
    del taps
    gc.collect()
    assert not layer.bias._backward_hooks


def test_what_is_kept_stays_small_outside_batches_too() -> None:
    """A loop that runs for days, and one that never enters `batches`."""
    taps, layer = watched()
    for index in range(300):
        run(taps, layer, index, 1.0)
    run(taps, layer, 300, math.nan)
    for _ in range(300):
        taps.begin(None)
    assert len(taps._kept) < 200
    run(taps, layer, 301, math.nan)
    found = taps.find(is_finite, None)
    assert found is not None
    assert found[:2] == (0, 301)
