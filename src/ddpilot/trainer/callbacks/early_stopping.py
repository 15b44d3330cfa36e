# SPDX-License-Identifier: Apache-2.0
"""`EarlyStopping`: stops training when a metric stops improving."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from ddpilot.errors import LoopError
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.log_rows import MonitoredMetric
from ddpilot.trainer.run import Run


class EarlyStopping(Callback):
    """Stop all ranks once `monitor` has not improved on its best value for `patience` epochs in a row.

    Epochs without validation because of `validate_every` do not count for a "val_" metric.

    `monitor`: a name in the epochs' rows, such as "val_loss" (default) or "val_accuracy". `mode`: "min" (default) if
    lower is better, "max" if higher is better. `min_delta`: improvements of at most this much do not count. Rank 0
    decides, from values that are equal on all ranks. A fit with `until_epoch` that was stopped stays stopped, also
    after resuming from a checkpoint; with a larger total, or with `epochs=`, patience starts over.

    `restore_best`: load the weights of the best epoch into model and EMA at the end, on all ranks; until then rank 0
    and checkpoints hold a copy in CPU memory. The optimizer keeps its state.

    Raises LoopError for invalid arguments, and after an epoch without this metric.
    """

    ranks = "all"  # restoring weights is collective

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        if patience < 1:
            found = f"`patience` is {patience}"
            raise LoopError("making an EarlyStopping", found=found, fix="Give a number of epochs, 1 or more.")
        self._metric = MonitoredMetric(monitor, mode, min_delta)
        self._patience = patience
        self._restore_best = restore_best
        self._weights: list[torch.Tensor] | None = None
        self.best_epoch: int | None = None
        """The epoch with the best value."""
        self.num_bad = 0
        """Number of epochs since then."""
        self.stopped: str = ""
        """Why this callback stopped training; "" if it did not."""
        self.stopped_goal = 0
        """The total number of epochs that this fit should have had."""

    @property
    def monitor(self) -> str:
        """The monitored metric."""
        return self._metric.monitor

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._metric.best

    def on_fit_start(self, run: Run) -> None:
        if self.stopped and run.until_epoch is not None and run.until_epoch <= self.stopped_goal:
            run.loop.print(f"stopped earlier: {self.stopped}; `epochs=` trains further", flush=True)
            run.stop(everywhere=True)
        elif self.stopped:
            self.stopped, self.num_bad = "", 0
        if not run.loop.group.is_rank_zero:
            self._weights = None
        elif self._restore_best and self._weights is None and self.best is not None:
            self._weights = _copy(run)  # an earlier fit ended with the best weights

    def on_epoch_end(self, run: Run) -> None:
        value = self._metric.read(run)
        if value is None:
            return
        self.num_bad += 1
        if self._metric.improve(value):
            self.best_epoch, self.num_bad = run.epoch, 0
            if self._restore_best and run.loop.group.is_rank_zero:
                self._weights = _copy(run)
        elif self.num_bad >= self._patience:
            self.stopped = (
                f"{self.monitor} was not better than {self.best} of epoch {self.best_epoch} for {self.num_bad} epochs"
            )
            self.stopped_goal = run.num_epochs
            if run.loop.group.is_rank_zero:
                run.stop()
            run.loop.print(self.stopped, flush=True)

    def on_fit_end(self, run: Run) -> None:
        self.num_bad = 0  # patience starts over in the next fit
        if run.loop.group.broadcast_object(self._weights is not None):
            _restore(run, self._weights)
        self._weights = None

    def state_dict(self) -> dict[str, Any]:
        names = ("best", "best_epoch", "num_bad", "stopped", "stopped_goal")
        state = {name: getattr(self, name) for name in names}
        return state if self._weights is None else {**state, "weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._metric.best = state["best"]
        self.best_epoch, self.num_bad = state["best_epoch"], state["num_bad"]
        self.stopped, self.stopped_goal = state["stopped"], state["stopped_goal"]
        self._weights = state.get("weights")


def _tensors(run: Run) -> Iterator[torch.Tensor]:
    models: list[nn.Module] = [run.model, *([] if run.ema is None else [run.ema])]
    for model in models:
        yield from model.parameters()
        yield from model.buffers()


def _copy(run: Run) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in _tensors(run)]


@torch.no_grad()
def _restore(run: Run, weights: list[torch.Tensor] | None) -> None:
    """Broadcast rank 0's `weights`, which are None on other ranks, into model and EMA. Collective."""
    for place, tensor in enumerate(_tensors(run)):
        # As flat bytes: neither bool tensors nor "channels last" weights can be broadcast as they are.
        wire = (tensor if weights is None else weights[place].to(tensor.device)).detach().contiguous().reshape(-1)
        if run.loop.world_size > 1 and wire.numel():
            run.loop.group.broadcast(wire.view(torch.uint8))
        tensor.copy_(wire.view(tensor.shape))
