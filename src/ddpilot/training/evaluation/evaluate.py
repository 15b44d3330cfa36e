# SPDX-License-Identifier: Apache-2.0
"""Evaluates metrics over a whole dataset, each sample once, at any world_size; default forward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddpilot.data.nested import to_device
from ddpilot.errors import LoopError
from ddpilot.group.device import broadcast_tensors, fork_rng
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batches import CurrentBatch, Loader, iterate_groups
from ddpilot.training.evaluation.metrics import (
    MeanOf,
    compute,
    divides_range,
    is_collection,
    make_meters,
    naming_metric,
)
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.strategy import strategy_of


@contextmanager
def evaluation_mode(model: nn.Module, group: GroupLike) -> Iterator[nn.Module]:
    """Yield the unwrapped model with rank 0's buffers, in `eval()` mode and without gradients. Collective.

    Afterwards the mode of every layer, including layers that the user put into `eval()`, and the random states of
    `random`, NumPy and torch are restored: what draws random numbers in an evaluation, on ranks that have samples, does
    not change the training that follows.
    """
    inner = unwrap(model)
    broadcast_tensors(inner.buffers(), group)
    try:
        with fork_rng([group.device]), eval_mode(inner), torch.no_grad():
            yield inner
    finally:
        strategy_of(inner).settle()


def rows_to_run(model: nn.Module, batch: CurrentBatch, group: GroupLike) -> Any:
    """Return the data on which this rank runs `model` for `batch`, on the device; None if it need not run.

    If a forward pass is collective, a rank without samples runs it on those of a different rank, whose outputs do not
    count. Collective then, if some rank has no samples.
    """
    data = batch.data if batch.count else None
    if batch.has_empty_rank and strategy_of(model).forward_is_collective:
        of_ranks = group.all_gather_object(data)
        data = next(one for one in of_ranks if one is not None) if data is None else data
    return None if data is None else to_device(data, group.device)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run the block with `model.eval()`, then restore the mode of each layer."""
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
    """Return the value of each metric over all samples of `loader`; see `Loop.evaluate`. Collective."""
    if not isinstance(metrics, Mapping) and not is_collection(metrics):
        raise LoopError(
            "evaluating",
            found=f"`metrics` is a {type(metrics).__name__}",
            fix='Give a dict: {"accuracy": metric}.',
        )
    meters = make_meters(metrics, group.device)
    needs_range = group.world_size > 1 and any(meter.needs_range for meter in meters.values())
    with evaluation_mode(model, group) as inner:
        for batch in iterate_groups(loader, group, epoch=0):
            arguments = None
            data = rows_to_run(inner, batch, group)
            if data is not None:
                outputs = (forward or forward_batch)(inner, data)
                arguments = outputs if batch.count else None
            is_divided = needs_range and divides_range(arguments, group)
            for (name, *_), meter in meters.items():
                with naming_metric(name, batch.index):
                    if arguments is not None:
                        meter.update(arguments, batch.count)
                    meter.end_batch(group, is_divided)
    return compute(meters, group)


def evaluate_step(
    model: nn.Module, loader: Loader, step: Callable[[nn.Module, Any], Any], group: GroupLike
) -> dict[str, float]:
    """Return the means over `loader` of what `step` returns for each batch; see `Loop.evaluate`. Collective."""
    given: object = step
    if not callable(given):
        found = f"`step` is a {type(given).__name__}"
        raise LoopError("evaluating", found=found, fix="Give a function of (model, batch) that returns means by name.")
    means = MeanOf("step", lambda result: result if isinstance(result, Mapping) else {"loss": result})
    with evaluation_mode(model, group) as inner:
        for batch in iterate_groups(loader, group, epoch=0):
            data = rows_to_run(inner, batch, group)
            result = None if data is None else step(inner, data)
            if batch.count:
                with naming_metric("step", batch.index):
                    means.update((result,), batch.count)
    return means.means(group)


def forward_batch(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return (output, target) for a batch. Raises LoopError if it has no target.

    For a tuple `(*inputs, target)`: `model(*inputs)` and the target. For a mapping: `model(**batch)` and the batch
    itself, for models that return their own loss.
    """
    if isinstance(batch, Mapping):
        return model(**batch), batch
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return model(*batch[:-1]), batch[-1]
    raise LoopError(
        "running the model on a batch",
        found=f"it is a {type(batch).__name__}{' of one item' * isinstance(batch, list | tuple)}: there is no target",
        fix="Pass `forward=lambda model, batch: (output, target)`.",
    )


def predict_batch(model: nn.Module, batch: Any) -> Any:
    """Return the output for a batch, as `forward_batch` does; a batch without a target is passed to the model whole."""
    if isinstance(batch, list | tuple) and len(batch) == 1:
        return model(batch[0])
    return forward_batch(model, batch)[0] if isinstance(batch, list | tuple | Mapping) else model(batch)
