# SPDX-License-Identifier: Apache-2.0
"""`BestWeights`: saves the weights of the best epoch to a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from ddpilot.checkpoint.atomic_files import HashingFile
from ddpilot.checkpoint.safetensors_file import check_dtypes, write_safetensors
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.log_rows import MonitoredMetric
from ddpilot.trainer.run import Run, find_inner


class BestWeights(Callback):
    """Write the weights of the epoch with the best `monitor` to `path`, a safetensors file, on rank 0.

    The EMA's weights if there is one, as it is what was evaluated; names have no prefixes, so any model of the same
    architecture loads them: `ddpilot.load_weights(model, path)`. The file is replaced
    atomically. To resume training, use a checkpoint, which holds more: `checkpoint_dir=`.

    `monitor`, `mode`, `min_delta`: as for `EarlyStopping`. Raises OSError if the file cannot be written, and LoopError
    as `EarlyStopping` does, on all ranks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "best.safetensors",
        monitor: str = "val_loss",
        *,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        self._path = Path(path)
        self._metric = MonitoredMetric(monitor, mode, min_delta)
        self.best_epoch: int | None = None
        """The epoch whose weights are in the file."""

    @property
    def monitor(self) -> str:
        """The monitored metric."""
        return self._metric.monitor

    @property
    def best(self) -> float | None:
        """The value of that epoch."""
        return self._metric.best

    def on_fit_start(self, run: Run) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def on_epoch_end(self, run: Run) -> None:
        value = self._metric.read(run)
        if value is None or not self._metric.improve(value):
            return
        weights = {name: tensor.cpu() for name, tensor in find_inner(run.ema or run.model).state_dict().items()}
        check_dtypes(weights, where="the best weights")
        new = self._path.with_name(f".{self._path.name}.new")
        new.unlink(missing_ok=True)
        with HashingFile(new) as sink:
            write_safetensors(sink, weights)
        os.replace(new, self._path)
        self.best_epoch = run.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._metric.best, self.best_epoch = state["best"], state["best_epoch"]
