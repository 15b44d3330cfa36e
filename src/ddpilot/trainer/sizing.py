# SPDX-License-Identifier: Apache-2.0
"""Search for the largest batch size of a trainer's model that fits on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddpilot.errors import LoopError
from ddpilot.group.accelerator import move
from ddpilot.group.rng import capture_rng, restore_rng
from ddpilot.trainer.batches import with_count
from ddpilot.trainer.fit import bring_state
from ddpilot.trainer.ranks import group_here
from ddpilot.training.batch_size import BatchSizeSearch, find_batch_size
from ddpilot.training.loop import Loop
from ddpilot.training.losses import add_losses

if TYPE_CHECKING:
    from ddpilot.trainer.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Search:
    """The arguments of one search, sent to the ranks."""

    dataset: Any
    max_per_rank: int | None
    headroom: float


def find_batch_size_here(trainer: Trainer, search: Search, has_own_step: bool) -> BatchSizeSearch:
    """Implement `Trainer.find_batch_size`. Collective."""
    _check(trainer, has_own_step)
    group = group_here()
    rng = capture_rng(group.device)
    loop = Loop(trainer.seed, precision=trainer.precision, group=group)
    move(trainer.model, loop.device)
    model, (optimizer,) = trainer.model, trainer.optimizers.values()
    bring_state(optimizer)
    is_loader = isinstance(search.dataset, DataLoader)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        assert trainer.loss_fn is not None  # checked by _check()
        loss: torch.Tensor = add_losses(with_count(trainer.loss_fn(*trainer.forward(model, batch)))[0])
        return loss

    try:
        return find_batch_size(
            loop,
            model,
            optimizer,
            search.dataset.dataset if is_loader else search.dataset,
            step,
            collate_fn=search.dataset.collate_fn if is_loader else None,
            max_per_rank=search.max_per_rank,
            headroom=search.headroom,
        )
    finally:
        restore_rng(rng, group.device)


def _check(trainer: Trainer, has_own_step: bool) -> None:
    """Raise LoopError for a trainer whose training step cannot be tried here."""
    if has_own_step or trainer.loss_fn is None:
        found = "a `train_batch` of one's own"
    elif len(trainer.optimizers) > 1:
        found = f"{len(trainer.optimizers)} optimizers"
    else:
        return
    raise LoopError(
        "looking for a batch size",
        found=f"{found}, so it is not known what a step holds in memory",
        fix="Call ddpilot.find_batch_size(loop, model, optimizer, dataset, step) on the ranks, with the step to try.",
    )
