# SPDX-License-Identifier: Apache-2.0
"""`Run`, the running fit as seen by callbacks and `train_batch`, and calls of its model outside of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ddpilot.data.nested import to_device, to_host
from ddpilot.errors import LoopError
from ddpilot.group.device import fork_rng
from ddpilot.trainer.history import History
from ddpilot.training.evaluation.evaluate import in_mode
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.options import EACH_EPOCH, Interval
from ddpilot.training.step.weight_averages import WeightAverage

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""Takes a model and a batch, and returns (output, target), the arguments of loss and metrics."""


@dataclass(kw_only=True, eq=False)
class Run:
    """One `fit` on this rank."""

    loop: Loop
    """The `Loop` of this fit: rank, device, collectives, stop on all ranks."""
    model: nn.Module
    """The model itself, on the device and not wrapped in DDP."""
    wrapped: Any
    """The model to call in a training step, directly or through its methods: in DDP if there are several ranks. For a
    ModuleDict, a dict of models."""
    optimizers: Mapping[str, Optimizer]
    """By name; the only one is named "optimizer"."""
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    """Schedulers that step after each update, by their optimizer's name."""
    ema: AveragedModel | None = None
    """The average of the weights, which evaluations use; None without `ema=` and `average=`."""
    history: History = field(default_factory=History)
    """Rows of the epochs so far, including those of earlier fits. Identical on all ranks."""
    num_epochs: int | None = 0
    """Total number of epochs at which this fit ends; None if it has `max_updates`."""
    until_epoch: int | None = None
    """The same number if `fit` was given a total (`until_epoch`, or `epochs` with a `checkpoint_dir`); else None."""
    max_updates: int | None = None
    """Total number of updates at which this fit ends; None if the fit counts epochs."""
    validate_every: Interval = EACH_EPOCH
    """Updates or epochs between validations."""
    batch: Any = None
    """This rank's part of the current batch, on the device; `on_batch_start` may assign a different one."""
    stepping: str = ""
    """Name of the optimizer that is about to step, in `on_step_start`."""
    loss: torch.Tensor | None = None
    """This rank's mean loss of the last batch, detached, on the device; NaN if it had no samples."""
    values: dict[str, Any] = field(default_factory=dict)
    """Latest measurements of callbacks by name, such as "grad_norm": numbers, or tensors with one element. Logs write
    them next to the loss."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The row of the epoch or interval that ends: "loss", "lr", and after the validation "val_..."; {} in between."""
    skips_validation: bool = False
    """True if this epoch has no validation because of `validate_every`."""
    left_out: list[str] = field(default_factory=list)
    """Names of trainable parameters that no optimizer holds; reported once for each new list."""

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0; continues over fits."""
        return self.loop.epoch

    @property
    def update(self) -> int:
        """Number of updates so far, including those of earlier fits."""
        return self.loop.num_updates

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer."""
        return next(iter(self.optimizers.values()))

    @property
    def evaluated(self) -> nn.Module:
        """The model that evaluations use: the average of the weights, once it has begun, else `model`."""
        if self.ema is None or (isinstance(self.ema, WeightAverage) and not self.ema.has_begun):
            return self.model
        return self.ema

    def stop(self, *, everywhere: bool = False) -> None:
        """Ask all ranks to stop after the same update; any rank may call it. See `Loop.stop`. Not collective.

        Ranks exchange their requests only at intervals. Called in `on_update_end` of rank 0, it takes effect within
        about 0.1 s, at most 32 updates later; called in `on_epoch_end`, before the next batch. `everywhere`: True if
        all ranks call it at the same point; they then stop after this update.
        """
        self.loop.stop(everywhere=everywhere)

    def call_model(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the model's `method` ("forward", "sample", ...) on this rank and return its result. Not collective.

        Calls the unwrapped model, or its average with `ema=`, in eval mode, in the loop's precision and without
        gradients. Tensors in the arguments are moved to the device, and tensors in the result to the CPU. The random
        state of training does not change.
        """
        device = self.loop.device
        with fork_rng([device]), self.loop.autocast():
            return call_model(self.evaluated, method, *args, device=device, **kwargs)


def call_model(model: nn.Module, method: str, *args: Any, device: torch.device, **kwargs: Any) -> Any:
    """Return `model.method(*args, **kwargs)` with tensors on the CPU; tensors in the arguments are moved to `device`.

    The model runs unwrapped, in eval mode and without gradients. Not collective. Raises LoopError if it has no such
    method.
    """
    inner = find_inner(model)
    function = getattr(inner, method, None)
    if not callable(function):
        raise LoopError(
            f"calling `{method}` of the model",
            found=f"{type(inner).__name__} has no such method",
            fix="Give the name of one of its methods, such as 'forward'.",
        )
    if method == "forward":  # includes its hooks
        function = inner
    with in_mode(inner, training=False), torch.no_grad():
        return to_host(function(*to_device(args, device), **to_device(kwargs, device)))


def find_inner(model: nn.Module) -> nn.Module:
    """Return the user's own module: unwrapped from DDP, and from an AveragedModel the averaged copy."""
    inner = unwrap(model)
    return inner.module if isinstance(inner, AveragedModel) else inner


def trained_parts(model: nn.Module) -> dict[str, nn.Module] | None:
    """Return the modules of a ModuleDict by name, which are trained as separate models; None for any other model.

    A ModuleDict subclass that defines `forward` is one model.
    """
    is_container = isinstance(model, nn.ModuleDict) and type(model).forward is nn.Module.forward
    return dict(model.named_children()) if is_container else None
