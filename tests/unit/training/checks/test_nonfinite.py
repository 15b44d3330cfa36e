# SPDX-License-Identifier: Apache-2.0
"""Gradients are looked at as they are, whatever they are, and stay so."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddpilot import FakeGroup
from ddpilot.errors import NonFiniteError
from ddpilot.training.checks.nonfinite import (
    FiniteCheck,
    GradientProbes,
    Place,
    are_finite,
    largest,
    raise_nonfinite,
    zero_unless,
)

SPARSE = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
KINDS = {
    "fp32": torch.tensor([1e-45, -0.0, 3.4e38, 3.4e38]),
    "bf16": torch.tensor([1.0, 3e38], dtype=torch.bfloat16),
    "strided": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t(),
    "empty": torch.empty(0),
    "sparse": SPARSE,
    "complex": torch.tensor([1j, 3e38]),
    "expanded": torch.ones(1).expand(4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_are_found_not_finite_and_stay_as_they_are(kind: str, bad: float) -> None:
    """Large sums and tiny numbers are finite; what is not is found beside others, and then forgotten."""
    gradient = KINDS[kind].clone() if kind != "expanded" else KINDS[kind]
    spoilt = [torch.ones(2), gradient, torch.tensor([0.0, bad])]
    assert [are_finite(one) for one in ([], [gradient], spoilt, [gradient, torch.ones(2)])] == [
        True,
        True,
        False,
        True,
    ]
    before, after = (one.to_dense().reshape(-1).contiguous() for one in (KINDS[kind], gradient))
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_gradients_that_are_sparse_are_looked_into() -> None:
    """A sum of duplicates may be the first that is not finite."""
    assert are_finite([SPARSE])
    assert not are_finite([SPARSE * math.inf])


@pytest.mark.parametrize("kind", KINDS)
def test_largest_is_finite_as_all_elements_are(kind: str) -> None:
    """Also where a sum or a square of them would not be."""
    gradient = KINDS[kind]
    assert torch.isfinite(largest([gradient]))
    assert torch.isfinite(largest([torch.full((4,), 6e4, dtype=torch.float16)]))
    if gradient.numel():
        assert not torch.isfinite(largest([torch.ones(2), gradient * math.nan]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "expanded"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_zero_unless_changes_no_bit_of_finite_gradients(kind: str, bad: float) -> None:
    """Times one as integers nothing changes, denormal numbers and negative zeros neither; what is bad becomes zeros."""
    kept, spoilt = KINDS[kind].clone(), KINDS[kind].clone() * bad
    zero_unless([torch.tensor(True), torch.tensor(True)], [kept])
    zero_unless([torch.tensor(True), torch.tensor(False)], [spoilt])
    before, after = (one.to_dense().contiguous().reshape(-1) for one in (KINDS[kind], kept))
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    assert not spoilt.to_dense().any()


class Queue:
    """Stands for a device that the host runs ahead of: numbers arrive when they are let through."""

    def __init__(self) -> None:
        self.num_arrived = 0
        self.num_waits = 0
        self.sent: list[Any] = []

    def send(self, number: torch.Tensor) -> Any:
        """What the watch may ask."""
        queue, place = self, len(self.sent)

        class Coming:
            """One number."""

            @property
            def is_there(self) -> bool:
                """Has the device come so far?"""
                return place < queue.num_arrived

            def read(self) -> float:
                """As a host that waits for it, if it has to."""
                queue.num_waits += place >= queue.num_arrived
                return number.item()

        self.sent.append(Coming())
        return self.sent[-1]


def test_gradients_of_an_accelerator_become_zeros_and_are_reported_once_they_have_arrived() -> None:
    """Without a wait of the host before that; what is finite stays; a report names the update, and forgets it."""
    queue = Queue()
    watch = FiniteCheck(torch.device("cuda"), queue)  # type: ignore[arg-type]
    model = nn.Linear(2, 1)
    seen = []
    for value in (1.0, math.nan, 2.0):
        for one in model.parameters():
            one.grad = torch.full_like(one, value)
        assert not watch.find(list(model.parameters()))
        watch.protect(list(model.parameters()))
        seen.append([] if model.weight.grad is None else model.weight.grad.tolist())
    assert seen == [[[1.0, 1.0]], [[0.0, 0.0]], [[2.0, 2.0]]]
    assert not watch.is_bad
    queue.num_arrived = 1
    assert not watch.is_bad
    queue.num_arrived = 2
    assert (watch.is_bad, queue.num_waits) == (True, 0)
    with pytest.raises(NonFiniteError, match="their sum over ranks is not finite.*weights.*: none[.]"):
        raise_nonfinite(FakeGroup(), watch, [model], None)
    assert (watch.is_bad, watch.find_pending()) == (False, False)


def test_find_pending_waits_for_gradients_that_have_not_arrived() -> None:
    """Before a save and at the end of an epoch nothing may be unknown; elements may share memory."""
    queue = Queue()
    watch = FiniteCheck(torch.device("cuda"), queue)  # type: ignore[arg-type]
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((1,), math.inf).expand(3)
    watch.find([weight])
    watch.protect([weight])
    assert weight.grad.tolist() == [0.0] * 3
    assert (watch.is_bad, watch.find_pending(), queue.num_waits) == (False, True, 1)


def test_one_check_protects_the_gradients_of_every_optimizer_that_it_covers() -> None:
    """A clip over two optimizers, which step one after the other; a dropped check zeroes no later gradients."""
    watch = FiniteCheck(torch.device("cuda"), Queue())  # type: ignore[arg-type]
    both = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for one in both:
        one.grad = torch.full_like(one, math.nan)
    watch.find(both)
    for one in both:
        watch.protect([one])
    assert [one.grad.tolist() for one in both if one.grad is not None] == [[0.0] * 2] * 2
    both[0].grad = torch.full_like(both[0], math.nan)
    watch.find(both)
    watch.drop_unprotected()
    watch.protect([both[1]])
    both[1].grad = torch.ones(2)
    watch.protect([both[1]])
    assert both[1].grad.tolist() == [1.0] * 2


def place(index: int) -> Place:
    """That of a batch that is an update by itself."""
    return Place(0, index, np.array([index, index + 100]))


def watched(width: int = 3) -> tuple[GradientProbes, nn.Linear]:
    """A layer whose smaller parameter, the bias, is watched."""
    taps, layer = GradientProbes(), nn.Linear(2, width)
    taps.watch(layer, layer.parameters())
    return taps, layer


def run(taps: GradientProbes, layer: nn.Linear, index: int, factor: float) -> None:
    """A backward pass of a batch."""
    taps.begin(place(index))
    (layer(torch.ones(2, 2)).sum() * factor).backward()


@pytest.mark.parametrize("width", [3, 5000])
def test_the_first_bad_gradient_is_found_with_its_batch(width: int) -> None:
    """Also one of many elements; of batches before a given one where there is such a one."""
    taps, layer = watched(width)
    for index, factor in enumerate([1.0, math.nan, math.inf, 1.0]):
        run(taps, layer, index, factor)
    found = taps.find(None)
    assert found is not None
    assert (*found[:2], found[2].tolist()) == (0, 1, [1, 101])
    assert taps.find(place(0)) == found
    taps.forget()
    assert taps.find(None) is None


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
    taps, model = GradientProbes(), Scaled()
    taps.watch(model, model.parameters())
    for index in range(2):
        taps.begin(place(index))
        model(torch.ones(2, 2)).sum().backward()
    assert [name for name, one in model.named_parameters() if one._backward_hooks] == ["layers.0.bias"]


def test_what_the_sum_makes_of_a_gradient_is_not_what_is_kept() -> None:
    """DDP writes the mean of all ranks into the gradient afterwards."""
    taps, layer = watched()
    run(taps, layer, 0, 1.0)
    assert layer.bias.grad is not None
    layer.bias.grad.fill_(math.nan)
    assert taps.find(None) is None


def test_backward_passes_without_samples_or_batch_count_for_nothing() -> None:
    """The mean of no samples is NaN."""
    taps, layer = watched()
    run(taps, layer, 0, 1.0)
    taps.pause()
    (layer(torch.ones(2, 2)).sum() * math.nan).backward()
    taps.begin(None)
    (layer(torch.ones(2, 2)).sum() * math.nan).backward()
    assert taps.find(None) is None


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
    found = taps.find(None)
    assert found is not None
    assert found[:2] == (0, 301)
