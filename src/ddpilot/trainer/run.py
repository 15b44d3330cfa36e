# SPDX-License-Identifier: Apache-2.0
"""`Run`: what a training looks like from inside, for callbacks and for a step of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ddpilot.trainer.calling import call_model
from ddpilot.trainer.history import History
from ddpilot.training.accelerator import fork_rng
from ddpilot.training.loop import Loop


@dataclass(kw_only=True, eq=False)
class Run:
    """One `fit` on this rank."""

    loop: Loop
    """Its primitives: rank, device, collectives, the joint stop."""
    model: nn.Module
    """The model itself, on the device and not wrapped."""
    wrapped: Any
    """What a training step calls, or a method of it: the model in DDP where there are several ranks. Of a ModuleDict, a
    dict of them."""
    optimizers: Mapping[str, Optimizer]
    """By name; "optimizer" where there is one."""
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    """Those that are stepped with each update, by their optimizer's name."""
    ema: AveragedModel | None = None
    """The average of the weights, which evaluations use; None where none was asked for."""
    history: History = field(default_factory=History)
    """Rows of the epochs so far, those of earlier fits too. Complete on rank 0 and on all others."""
    num_epochs: int = 0
    """The number that `epoch` goes up to."""
    until_epoch: int | None = None
    """The same, where `fit` was asked for a total; None where it was asked for so many more."""
    loss: torch.Tensor | None = None
    """This rank's mean of the last batch, detached, on the device; NaN where it had no sample."""
    values: dict[str, Any] = field(default_factory=dict)
    """The newest of what callbacks measure from update to update, by name, such as "grad_norm": numbers or tensors of
    one element. Logs write them beside the loss."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The row of the current epoch: "loss", "lr", and after the validation "val_..."; {} until there is something."""
    skips_validation: bool = False
    """Does this epoch go without the validation that others have, as `validate_every` says?"""
    left_out: list[str] = field(default_factory=list)
    """Names of parameters that are not frozen and that no optimizer has; each new list of them is said once."""

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0; goes on from fit to fit."""
        return self.loop.epoch

    @property
    def update(self) -> int:
        """Number of updates so far, those of earlier fits too."""
        return self.loop.num_updates

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer."""
        return next(iter(self.optimizers.values()))

    def stop(self, *, everywhere: bool = False) -> None:
        """Ask all ranks to stop, from any of them: they leave after the same update, soon; see `Loop.stop`.

        In `on_update_end` of rank 0 that is within about 0.1 s, after 32 more updates at most, since the ranks exchange
        such flags so often; in `on_epoch_end` before another batch is trained on. `everywhere`: where all ranks call it
        at the same point, after this very update.
        """
        self.loop.stop(everywhere=everywhere)

    def call_model(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the model's `method` ("forward", "sample", ...) returns on this rank, on the CPU. Not collective.

        Unwrapped, in eval mode and the loop's precision, without gradients; tensors among the arguments are moved to
        the device. The average's method, where there is an EMA. Training goes on with the random state that it had.
        """
        device = self.loop.device
        with fork_rng([device]), self.loop.autocast():
            return call_model(self.ema or self.model, method, *args, device=device, **kwargs)
