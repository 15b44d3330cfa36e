# SPDX-License-Identifier: Apache-2.0
"""Metrics and predictions of a whole dataset: each sample once, on the unwrapped model, at any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddpilot.data.devices import to_device
from ddpilot.errors import LoopError
from ddpilot.group.protocol import GroupLike
from ddpilot.training.accelerator import fork_rng
from ddpilot.training.forwarding import forward_batch, predict_batch
from ddpilot.training.grouping import CurrentBatch, Loader, iterate_groups
from ddpilot.training.metrics import divides_range, is_collection, make_meters, naming_metric
from ddpilot.training.wrapping import sync_buffers, unwrap


@contextmanager
def evaluation_mode(model: nn.Module, group: GroupLike) -> Iterator[nn.Module]:
    """The unwrapped model with equal buffers on all ranks, in `eval()` and without gradients. Collective.

    Afterwards every layer is in the mode it was in, those that the user had frozen too, and torch's random state is
    what it was: a model that draws in `eval()` does not change the training that follows.
    """
    inner = unwrap(model)
    sync_buffers(inner, group)
    with fork_rng([group.device]), eval_mode(inner), torch.no_grad():
        yield inner


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()` for a while; afterwards each layer is in the mode it was in."""
    modes = [(layer, layer.training) for layer in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for layer, was_training in modes:
            layer.training = was_training


def evaluate(
    model: nn.Module,
    loader: Loader,
    metrics: Any,
    group: GroupLike,
    forward: Callable[[nn.Module, Any], tuple[Any, ...]] | None = None,
) -> dict[str, Any]:
    """The value of each metric over all samples of `loader`; see `Loop.evaluate`. Collective."""
    if not isinstance(metrics, Mapping) and not is_collection(metrics):
        raise LoopError(
            "evaluating",
            found=f"`metrics` is a {type(metrics).__name__}",
            fix='Give a dict: {"accuracy": metric}.',
            rank=group.rank,
        )
    meters = make_meters(metrics, group.device)
    asks = group.world_size > 1 and any(meter.asks_for_range for meter in meters.values())
    with evaluation_mode(model, group) as inner:
        for batch in iterate_groups(loader, group, epoch=0):
            arguments = None
            if batch.count:
                arguments = (forward or forward_batch)(inner, to_device(batch.data, group.device))
            is_divided = asks and divides_range(arguments, group)
            for name, meter in meters.items():
                with naming_metric(name, batch.index, group.rank):
                    if arguments is not None:
                        meter.update(arguments, batch.count)
                    meter.end_batch(group, is_divided)
    return {name: meter.compute(group) for name, meter in meters.items()}


def local_outputs(
    model: nn.Module,
    loader: Loader,
    group: GroupLike,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Iterator[tuple[CurrentBatch, Any]]:
    """This rank's piece of every global batch with what the model says to it; None where it has no sample."""
    for batch in iterate_groups(loader, group, epoch=0):
        output = (forward or predict_batch)(model, to_device(batch.data, group.device)) if batch.count else None
        yield batch, output
