# SPDX-License-Identifier: Apache-2.0
"""Computes BatchNorm statistics of given weights over a dataset, as torch's `update_bn`, on all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from ddpilot.data.nested import to_device
from ddpilot.errors import LoopError
from ddpilot.group.device import fork_rng
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batches import CurrentBatch, LimitedLoader, Loader, iterate_groups
from ddpilot.training.evaluation.evaluate import predict_batch
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.strategy import strategy_of

_DID = "updating BatchNorm statistics"


def update_batch_norm(
    model: nn.Module,
    loader: Loader,
    group: GroupLike,
    *,
    epoch: int = 0,
    max_batches: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Compute the statistics of all BatchNorm layers over `loader`; see `Loop.update_batch_norm`. Collective."""
    inner = unwrap(model)
    inner = inner.module if isinstance(inner, AveragedModel) else inner
    limited = loader if max_batches is None else LimitedLoader(loader, max_batches)
    with fork_rng([group.device]), _training(inner), torch.no_grad():
        layers = [
            one for one in inner.modules() if isinstance(one, _BatchNorm) and one.track_running_stats and one.training
        ]
        if not layers:
            return
        for layer in layers:
            layer.reset_running_stats()
        with _replaced_forwards(layers, state := _Batch(group)):
            for batch in iterate_groups(limited, group, epoch=epoch):
                state.batch = batch
                (forward or predict_batch)(inner, to_device(_rows(batch, group), group.device))
        strategy_of(inner).settle()


def _rows(batch: CurrentBatch, group: GroupLike) -> Any:
    """Return this rank's rows; if it has none, those of another rank, which do not count. Collective then."""
    if not batch.has_empty_rank:
        return batch.data
    data = batch.data if batch.count else None
    of_ranks = group.all_gather_object(data)
    return data if batch.count else next(one for one in of_ranks if one is not None)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    modes = [(layer, layer.training) for layer in model.modules()]
    model.train()
    try:
        yield
    finally:
        for layer, was_training in modes:
            layer.training = was_training


class _Batch:
    """The current batch, as the layers see it."""

    def __init__(self, group: GroupLike) -> None:
        self.group = group
        self.batch: CurrentBatch | None = None
        self.num_seen: dict[nn.Module, int] = {}


@contextmanager
def _replaced_forwards(layers: list[_BatchNorm], state: _Batch) -> Iterator[None]:
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.__dict__["forward"] = functools.partial(_forward, layer, state)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            del layer.__dict__["forward"]
            if own is not None:
                layer.__dict__["forward"] = own


def _forward(layer: _BatchNorm, state: _Batch, x: torch.Tensor) -> torch.Tensor:
    """Normalize by the statistics of all ranks' rows, and add them to the cumulative average. Collective."""
    assert state.batch is not None  # set before each forward pass
    assert layer.running_mean is not None  # `track_running_stats` is True
    assert layer.running_var is not None
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    mean, squares, count = _joint_moments(x, state.group, counts=bool(state.batch.count))
    if count < 2:
        found = f"batch {state.batch.index} has a single value per channel on all ranks together"
        raise LoopError(_DID, found=found, fix="Use drop_last=True, or a batch size without a last batch of one.")
    number = state.num_seen[layer] = state.num_seen.get(layer, 0) + 1
    dtype = layer.running_mean.dtype
    layer.running_mean.lerp_(mean.to(dtype), 1 / number)
    layer.running_var.lerp_((squares / (count - 1)).to(dtype), 1 / number)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked += 1
    return nn.functional.batch_norm(
        x, mean.to(dtype), (squares / count).to(dtype), layer.weight, layer.bias, False, 0.0, layer.eps
    )


def _joint_moments(x: torch.Tensor, group: GroupLike, *, counts: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean and sum of squared deviations per channel, shape (channels,), and the values per channel.

    Over the rows of all ranks; those of this rank are left out unless it `counts`.
    """
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    rows, channels = x.to(wide).transpose(0, 1).flatten(1), x.shape[1]
    table = torch.zeros(group.world_size, 1 + 2 * channels, dtype=wide, device=x.device)
    if counts and rows.shape[1]:
        own = rows.mean(1)
        deviations = (rows - own[:, None]).square().sum(1)
        table[group.rank] = torch.cat([own.new_tensor([rows.shape[1]]), own, deviations])
    if group.world_size > 1:
        table = group.all_reduce(table)
    nums, means, squares = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
    count = max(1, round(nums.sum().item()))
    mean = (nums * means).sum(0) / count
    return mean, (squares + nums * (means - mean).square()).sum(0), count
