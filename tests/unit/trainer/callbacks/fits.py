# SPDX-License-Identifier: Apache-2.0
"""A small training in this process, for callbacks to look on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import Trainer
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.run import Run

X = torch.arange(20.0).reshape(10, 2) / 10
DATA = TensorDataset(X, X.sum(1, keepdim=True))
"""With batches of four: three updates in an epoch."""


def make_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """Make a trainer of a model with two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    given = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options}
    return Trainer(model, nn.functional.mse_loss, callbacks=callbacks, **given)


def fit(trainer: Trainer, epochs: int = 1, validate: bool = True, **options: Any) -> Trainer:
    """Train in this process; the trainer."""
    val_set = DATA if validate else None
    given = {"epochs": None if "until_epoch" in options else epochs, **options}
    trainer.fit(DATA, val_set, global_batch_size=4, shuffle=False, nproc_per_node=0, **given)
    return trainer


class Each(Callback):
    """Calls a function with the run at one kind of event."""

    def __init__(self, event: str, act: Callable[[Run], object]) -> None:
        setattr(self, event, act)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}


def metric(*values: float) -> Each:
    """A validation that finds these values of "val_score", epoch by epoch."""
    given = iter(values)
    return Each("on_evaluate_end", lambda run: run.metrics.update(val_score=next(given)))
