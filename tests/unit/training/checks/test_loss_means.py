# SPDX-License-Identifier: Apache-2.0
"""Losses that are means over something else than samples are refused without a count, and no other loss is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy, cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup
from ddpilot.errors import LoopError
from ddpilot.training.loop import Loop

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")

WEIGHT = torch.tensor([1.0, 5.0, 0.2])
IGNORED = r"a cross entropy that ignores targets of -100 .*loop\.backward\(loss, count=\(target != -100\)\.sum\(\)\)"
WEIGHTED = r"a cross entropy with class weights .*loop\.backward\(loss, count=weight\[target\]\.sum\(\)\)"


def backward(loss_of: Callable[[Any, Any, Any], Any], y: torch.Tensor, size: int = 4, **options: Any) -> None:
    """One pass over `y` in batches of `size`; `loss_of` takes the loop, scores of (samples, 3, ...) and targets."""
    loop = Loop(group=FakeGroup(), progress=False, **options)
    bias = loop.prepare(nn.ParameterList([torch.zeros(3)]))[0]
    for (target,) in loop.batches(loop.loader(TensorDataset(y), global_batch_size=size)):
        steps = () if target.is_floating_point() else y.shape[1:]
        scores = bias.reshape(3, *[1] * len(steps)).expand(len(target), 3, *steps)
        loss = loss_of(loop, scores, target)
        if loss is not None:
            loop.backward(loss)


BIAS = nn.Parameter(torch.ones(3))
FULL = torch.tensor([0, 1, 2, 0, 1, 1])
HOLES = torch.tensor([0, -100, 2, 0, 1, 1])
STEPS = torch.tensor([[0, 1, -100], [2, 0, -100], [1, 1, -100], [0, 0, -100]])
RAGGED = torch.tensor([[0, 1, -100], [2, -100, -100], [1, 1, -100], [0, 0, 2]])


@pytest.mark.parametrize(
    ("loss_of", "y", "said"),
    [
        pytest.param(lambda _, s, y: cross_entropy(s, y), HOLES, IGNORED, id="ignored"),
        pytest.param(lambda _, s, y: cross_entropy(s, y), RAGGED, IGNORED, id="ignored steps"),
        pytest.param(lambda _, s, y: cross_entropy(s, y, label_smoothing=0.1), HOLES, IGNORED, id="smoothed"),
        pytest.param(lambda _, s, y: 0.5 * cross_entropy(s, y) + s.square().mean(), HOLES, IGNORED, id="with a term"),
        pytest.param(lambda _, s, y: {"k": cross_entropy(s, y)}, HOLES, f"the loss 'k' contains {IGNORED}", id="named"),
        pytest.param(lambda _, s, y: cross_entropy(s, y, ignore_index=1), FULL, "targets of 1 ", id="another"),
        pytest.param(lambda _, s, y: cross_entropy(s, y, weight=WEIGHT), FULL, WEIGHTED, id="weighted"),
        pytest.param(
            lambda _, s, y: nn.NLLLoss(WEIGHT)(s.log_softmax(1), y), HOLES, WEIGHTED, id="weighted and ignored"
        ),
        pytest.param(
            lambda _, s, y: torch.stack([cross_entropy(s, y), cross_entropy(s, y * 0)]).sum(), HOLES, IGNORED, id="two"
        ),
    ],
)
def test_a_mean_over_other_things_than_samples_is_refused_without_a_count(
    loss_of: Callable[..., Any], y: torch.Tensor, said: str
) -> None:
    """On one rank too, with the count to pass."""
    with pytest.raises(LoopError, match=said):
        backward(loss_of, y)


def one_by_one(_: Loop, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean of a mean for each sample."""
    return sum((cross_entropy(s[None], t[None]) for s, t in zip(scores, y, strict=True)), torch.zeros(())) / len(y)


@pytest.mark.parametrize(
    ("loss_of", "y"),
    [
        pytest.param(lambda _, s, y: cross_entropy(s, y), FULL, id="nothing ignored"),
        pytest.param(lambda _, s, y: cross_entropy(s, y), STEPS, id="equally much of each sample"),
        pytest.param(lambda _, s, y: cross_entropy(s, y, weight=torch.ones(3)), FULL, id="equal weights"),
        pytest.param(lambda _, s, y: cross_entropy(s, y, weight=WEIGHT, reduction="sum") / len(y), FULL, id="sum"),
        pytest.param(lambda _, s, y: cross_entropy(s, y, reduction="none").mean(), HOLES, id="each"),
        pytest.param(one_by_one, RAGGED, id="one by one"),
        pytest.param(
            lambda loop, s, y: loop.backward(cross_entropy(s, y, weight=WEIGHT), WEIGHT[y].sum().item()),
            FULL,
            id="count",
        ),
        pytest.param(lambda _, s, y: {"k": (cross_entropy(s, y), (y != -100).sum())}, HOLES, id="named count"),
    ],
)
def test_means_over_samples_and_losses_with_a_count_are_accepted(loss_of: Callable[..., Any], y: torch.Tensor) -> None:
    """In batches of several samples, and of one."""
    backward(loss_of, y)
    backward(loss_of, y, 1)


SUM = "contains a sum over this rank's samples, and has to be their mean"
Y = torch.nn.functional.one_hot(FULL, 3).float()


@pytest.mark.parametrize(
    "loss_of",
    [
        pytest.param(lambda _, s, y: mse_loss(s, y, reduction="sum"), id="fused"),
        pytest.param(lambda _, s, y: (s - y).square().sum(), id="squares"),
        pytest.param(lambda _, s, y: nn.L1Loss(reduction="sum")(s, y), id="sizes"),
        pytest.param(lambda _, s, y: mse_loss(s, y, reduction="none").sum(), id="of each"),
        pytest.param(lambda _, s, y: cross_entropy(s, y.argmax(1), reduction="sum"), id="classes"),
        pytest.param(
            lambda _, s, y: binary_cross_entropy(s.sigmoid(), y, reduction="sum") - 0.5 * (1 + s - s.exp()).sum(),
            id="variational",
        ),
        pytest.param(lambda loop, s, y: loop.backward(mse_loss(s, y, reduction="sum"), len(y)), id="count"),
        pytest.param(lambda _, s, y: {"k": (mse_loss(s, y, reduction="sum"), len(y))}, id="named"),
    ],
)
def test_a_sum_over_samples_is_refused(loss_of: Callable[..., Any]) -> None:
    """On one rank too: the sum of two ranks would count each sample half as much."""
    with pytest.raises(LoopError, match=SUM):
        backward(loss_of, Y)


@pytest.mark.parametrize(
    "loss_of",
    [
        pytest.param(lambda _, s, y: mse_loss(s, y, reduction="sum") / len(y), id="divided"),
        pytest.param(lambda _, s, y: (s - y).square().sum() * (1 / len(y)), id="multiplied"),
        pytest.param(lambda _, s, y: ((s - y).square() / len(y)).sum(), id="divided before"),
        pytest.param(lambda _, s, y: nn.KLDivLoss(reduction="batchmean")(s.log_softmax(1), y), id="batchmean"),
        pytest.param(lambda _, s, y: (s - y).square().mean(0).sum(), id="features"),
        pytest.param(lambda _, s, y: torch.stack([mse_loss(s, y), s.abs().mean()]).sum(), id="of means"),
        pytest.param(
            lambda loop, s, y: mse_loss(s, y) + BIAS.square().sum() + mse_loss(BIAS, BIAS * 0, reduction="sum"),
            id="penalty",
        ),
    ],
)
@pytest.mark.parametrize("size", [3, 1])
def test_a_mean_made_of_a_sum_is_accepted(loss_of: Callable[..., Any], size: int) -> None:
    """In batches of as many samples as a parameter has rows, and of one sample."""
    backward(loss_of, Y, size)


def test_a_rank_with_one_sample_compares_its_batches() -> None:
    """Its part of a batch shows no difference between samples; the next batch does."""
    seen: list[int] = []
    loop = Loop(group=FakeGroup(rank=0, world_size=2), progress=False)
    bias = nn.Parameter(torch.zeros(3))

    def train() -> None:
        for (y,) in loop.batches(loop.loader(TensorDataset(RAGGED.repeat_interleave(2, 0)), global_batch_size=2)):
            seen.append(len(y))
            loop.backward(cross_entropy(bias.reshape(1, 3, 1).expand(len(y), 3, 3), y))

    with pytest.raises(LoopError, match="batch 1 of epoch 0.*" + IGNORED):
        train()
    assert seen == [1, 1]
