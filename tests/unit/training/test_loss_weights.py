# SPDX-License-Identifier: Apache-2.0
"""Loss weights: of nothing, of NaN, and of counts that come batch by batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpilot.training.loss_weights import CountTotals, backward_weighted


@pytest.mark.parametrize("seed", [0.25, torch.tensor(0.25), 1.0])
def test_backward_weighted_scales_the_gradient(seed: float | torch.Tensor) -> None:
    """The gradient is that of the loss times the seed."""
    weight = nn.Parameter(torch.tensor(2.0))
    backward_weighted([weight**2], [seed], [])
    assert weight.grad == torch.tensor(4.0) * seed


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_backward_weighted_adds_exact_zeros_without_a_seed(bad: float) -> None:
    """Whatever the loss is: the mean of no samples is NaN. What was accumulated before stays, and no hook is left."""
    weight, scale, frozen = (nn.Parameter(torch.tensor(2.0), requires_grad=one) for one in (True, True, False))
    weight.grad = torch.tensor(3.0)
    loss = nn.functional.mse_loss(torch.zeros(0, 1) * weight * frozen, torch.zeros(0, 1)) * scale * bad
    assert loss.isnan()
    backward_weighted([loss], None, [nn.ParameterList([weight, scale]), nn.ParameterList([frozen])])
    assert (weight.grad.item(), scale.grad) == (3.0, torch.tensor(0.0))
    (weight * 5).backward()  # type: ignore[no-untyped-call]
    assert weight.grad.item() == 8.0


def test_count_totals_correct_what_the_first_batch_stood_in_for() -> None:
    """Three batches of 10, 40 and 50 tokens: divided by 30 at first, which makes 100 together."""
    totals = CountTotals(10.0, 3)
    for count in (10.0, 40.0, 50.0):
        totals.add(count)
    assert totals.reference == 30.0
    assert totals.correction == pytest.approx(0.3)


def test_count_totals_are_zero_when_nothing_was_counted() -> None:
    """No division by zero."""
    totals = CountTotals(0.0, 2)
    totals.add(0.0)
    assert totals.correction == 0.0
