# SPDX-License-Identifier: Apache-2.0
"""What a `Trainer` is made of, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddpilot.api.launch import Launcher
from ddpilot.errors import LoopError
from ddpilot.findings.finding import Finding
from ddpilot.trainer.batches import Forward
from ddpilot.trainer.callback import Callback, check_callbacks
from ddpilot.trainer.checking import (
    check_metrics,
    check_model,
    check_trainer,
    naming_arguments,
)
from ddpilot.trainer.history import History
from ddpilot.trainer.parts import make_ema, make_optimizers, make_schedulers
from ddpilot.trainer.position import Position
from ddpilot.training.explanation import Explanation
from ddpilot.training.forwarding import forward_batch
from ddpilot.training.precision import Kind
from ddpilot.training.wrapping import class_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TrainerState:
    """The parts and the records of a `Trainer`, which says what the arguments are."""

    @naming_arguments(
        "making a Trainer",
        dict.fromkeys(("epochs", "global_batch_size", "batch_size", "nproc_per_node"), "It belongs to `fit`."),
    )
    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        forward: Forward | None = None,
        scheduler: Any = None,
        scheduler_per: Literal["update", "epoch"] = "update",
        ema: float | AveragedModel | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        precision: Kind = "fp32",
        seed: int = 0,
        launcher: Launcher | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        """The model that was given; after a fit with the trained weights."""
        self.loss_fn = loss_fn
        self.optimizers = make_optimizers(optimizer, model)
        self.schedulers = make_schedulers(scheduler, self.optimizers)
        self.ema = make_ema(ema, model)
        check_metrics(metrics)
        self.metrics = dict(metrics or {})
        self.callbacks = list(callbacks)
        check_callbacks(callbacks)
        self.forward: Forward = forward or forward_batch
        self.scheduler_per = scheduler_per
        self.clip_norm = clip_norm
        self.accumulate = accumulate
        self.precision: Kind = precision
        self.seed = seed
        self.launcher = launcher
        self.history = History()
        """Rows of all fits so far."""
        self.position = Position()
        """How far it has come, over all fits: `epoch`, `num_updates`."""
        self.findings: tuple[Finding, ...] = ()
        """What fits have found to be unwise, each said once."""
        self.explanation: Explanation | None = None
        """What the last fit chose for DDP: see `explain`."""
        self.has_own_forward = forward is not None
        """Was `forward` given?"""
        self.batch_size = 64
        """Samples of all ranks in a batch of `evaluate` and `predict`, by default: that of the last fit."""
        self.nproc_per_node: int | str | None = None
        """Ranks of the last fit that said a number of them, which the next one starts too."""
        check_trainer(self)

    @property
    def all_metrics(self) -> dict[str, Any]:
        """The loss, by the name "loss", and the metrics."""
        return self.metrics if self.loss_fn is None else {"loss": self.loss_fn, **self.metrics}

    def __repr__(self) -> str:
        num = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        name = f"{type(self).__name__}({class_name(self.model)}, {num:,} parameters to train"
        return f"{name}; epoch {self.position.epoch}, {self.position.num_updates} updates)"

    def explain(self) -> Explanation:
        """What the last fit chose for DDP and the optimizers, why, what it cost, and what would be better.

        The text of `Loop.explain` at the end of that fit; a notebook shows a table. Not collective. Raises LoopError
        before the first fit.
        """
        if self.explanation is None:
            found = "no fit has ended yet, which is what chooses and measures"
            raise LoopError("explaining what was chosen", found=found, fix="Call fit() first; `ddp=` chooses yourself.")
        return self.explanation

    def plot(self) -> Figure:
        """Losses and metrics over the epochs, as a matplotlib figure; a notebook shows it as the value of a cell.

        Raises LoopError where nothing was recorded yet.
        """
        from ddpilot.trainer.plotting import plot_history

        return plot_history(self.history)
