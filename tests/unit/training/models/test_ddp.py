# SPDX-License-Identifier: Apache-2.0
"""Preparing a model where no group is needed, and what is refused."""

from __future__ import annotations

import pytest
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddpilot import FakeGroup
from ddpilot.data.global_batches import Plan
from ddpilot.errors import LoopError
from ddpilot.training.checks.buffers import check_plan, find_batch_norms
from ddpilot.training.models.ddp import unwrap, wrap
from ddpilot.training.models.ddp_options import DDPOptions


def test_wrap_leaves_a_model_alone_when_there_is_one_rank() -> None:
    """No DDP, the same object."""
    model = nn.Linear(2, 2)
    assert wrap(model, FakeGroup()) == (model, ())
    assert unwrap(model) is model


def test_wrap_leaves_a_model_alone_when_it_trains_nothing() -> None:
    """DDP refuses a model without parameters to train: a frozen feature extractor is prepared like any other."""
    model = nn.Linear(2, 2).requires_grad_(False)
    assert wrap(model, FakeGroup(world_size=2)) == (model, ())


def test_wrap_refuses_synced_batch_norm_on_the_cpu() -> None:
    """torch's own error comes in the first forward; this one says what to use."""
    with pytest.raises(LoopError, match="runs only on GPUs, and this rank's device is the CPU. Use GroupNorm"):
        wrap(nn.BatchNorm1d(2), FakeGroup(), DDPOptions(sync_batch_norm=True))


def test_unwrap_keeps_an_averaged_model() -> None:
    """Its weights are the averages: only a DDP model inside is taken out."""
    averaged = AveragedModel(nn.Linear(2, 2))
    assert unwrap(averaged) is averaged


def test_batch_norms_are_found_unless_frozen() -> None:
    """In eval mode a layer takes no statistics."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[2].eval()
    assert find_batch_norms([model]) == ["0"]


@pytest.mark.parametrize(("size", "ranks"), [(64, ()), (48, (2,)), (24, (0, 1, 2))])
def test_check_batch_norms_names_the_ranks_with_few_samples(size: int, ranks: tuple[int, ...]) -> None:
    """Below 16 samples a rank; none at 16 and more."""
    plan = Plan(size * 3, size, world_size=3, batch_split=[2.0, 2.0, 1.5])
    found = check_plan([nn.BatchNorm1d(2)], plan)
    assert tuple(rank for finding in found for rank in finding.ranks) == ranks


@pytest.mark.parametrize("model", [nn.GroupNorm(1, 2), nn.BatchNorm1d(2).eval()])
def test_check_batch_norms_is_silent_about_others(model: nn.Module) -> None:
    """Models without it may have one sample on a rank."""
    assert check_plan([model], Plan(9, 8, world_size=4)) == ()
    assert check_plan([nn.BatchNorm1d(2)], object()) == ()
