# SPDX-License-Identifier: Apache-2.0
"""Evaluate, predict and call a trainer's model, in this process or on this rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader

from ddpilot.group.protocol import GroupLike
from ddpilot.trainer.batches import Forward
from ddpilot.trainer.calling import call_model, find_inner
from ddpilot.trainer.loading import NO_SIZES, make_loader_of
from ddpilot.trainer.ranks import group_here, share_weights
from ddpilot.training.batches import Loader
from ddpilot.training.device_placement import ensure_on_device
from ddpilot.training.evaluation.evaluate import evaluate
from ddpilot.training.evaluation.predict import predict
from ddpilot.training.step.precision import Precision

if TYPE_CHECKING:
    from ddpilot.trainer.core import TrainerState
    from ddpilot.trainer.trainer_looking import LookingTrainer


def evaluate_here(
    trainer: TrainerState,
    dataset: Any,
    metrics: Mapping[str, Any],
    forward: Forward | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Implement `Trainer.evaluate`; `forward`: None for the trainer's. Collective on ranks."""
    group = group_here()
    model, loader = _place(trainer, dataset, options, group)
    with Precision(trainer.precision, group.device).autocast():
        return evaluate(model, loader, metrics, group, forward or trainer.forward)


def predict_here(
    trainer: LookingTrainer,
    dataset: Any,
    to: str | os.PathLike[str] | None,
    forward: Callable[[nn.Module, Any], Any] | None,
    options: Mapping[str, Any],
) -> Any:
    """Implement `Trainer.predict`; `forward`: None for the trainer's. Collective on ranks."""
    group = group_here()
    model, loader = _place(trainer, dataset, options, group)
    with Precision(trainer.precision, group.device).autocast():
        return predict(model, loader, group, to=to, forward=forward or trainer.output_of)


def call_here(trainer: TrainerState, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: str) -> Any:
    """Implement `Trainer.call`. Not collective."""
    group = group_here()
    if ranks == "zero" and not group.is_rank_zero:
        return None
    model = ensure_on_device(find_inner(trainer.ema or trainer.model), group.device)
    with Precision(trainer.precision, group.device).autocast():
        return call_model(model, method, *args, device=group.device, **kwargs)


def _place(
    trainer: TrainerState, dataset: Any, options: Mapping[str, Any], group: GroupLike
) -> tuple[nn.Module, Loader]:
    """Return the model on the device, and this rank's loader."""
    model = ensure_on_device(find_inner(trainer.ema or trainer.model), group.device)
    if not trainer.position.num_updates:
        share_weights(model, group)
    sizes = {name: options.get(name) for name in NO_SIZES}
    if not any(sizes.values()) and not isinstance(dataset, DataLoader):
        sizes = {**NO_SIZES, "global_batch_size": trainer.batch_size}
    left = {name: value for name, value in options.items() if name not in NO_SIZES}
    return model, make_loader_of(dataset, group, trainer.seed, sizes, left)
