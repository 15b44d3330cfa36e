# SPDX-License-Identifier: Apache-2.0
"""Logs of updates and epochs, written by the loggers of `Loop`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from ddpilot.errors import LoopError
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.history import flatten
from ddpilot.trainer.run import Run
from ddpilot.training.logs.loggers import (
    CsvLogger,
    JsonLinesLogger,
    Logger,
    LogStart,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
    plain,
)


def update_row(run: Run) -> dict[str, Any]:
    """Return the row of the current update: "batch_loss", this rank's mean of the batch, and callbacks' measurements.

    Waits for the device if it is still computing them.
    """
    row = {"epoch": run.epoch, "update": run.update, "batch_loss": run.loss, **run.values}
    return {name: plain(value) for name, value in row.items() if value is not None}


def epoch_row(run: Run) -> dict[str, Any]:
    """Return the row of the current epoch or interval, with nested dicts flattened to "name.key"."""
    return {name: plain(value) for name, value in flatten(run.metrics).items()}


def check_every(name: str, every: int) -> int:
    """Return `every`, a number of updates. Raises LoopError below 1."""
    if every < 1:
        raise LoopError(f"making a {name}", found=f"`every` is {every}", fix="Give a number of updates, 1 or more.")
    return every


class RowLog(Callback):
    """Base class of logs: passes the rows of updates and epochs to a logger.

    If intervals of updates are validated, epochs are logged too only if `_has_kinds`: they have the same names.
    """

    _has_kinds: ClassVar[bool] = False
    """True if each row has its kind."""

    def __init__(self, logger: Logger, every: int) -> None:
        self._logger = logger
        self._every = check_every(type(self).__name__, every)

    def on_fit_start(self, run: Run) -> None:
        self._logger.check()
        start = LogStart(
            update=run.update, is_new=not run.update, is_kept=lambda _, row: _is_kept(row, run, self._has_kinds)
        )
        self._logger.open(start)

    def on_update_end(self, run: Run) -> None:
        if run.update % self._every == 0:
            self._logger.write("update", update_row(run), run.update)

    def on_epoch_end(self, run: Run) -> None:
        if self._has_kinds or not run.validate_every.counts_updates:
            self._logger.write("epoch", epoch_row(run), run.update)

    def on_interval_end(self, run: Run) -> None:
        self._logger.write("interval", epoch_row(run), run.update)

    def on_fit_end(self, run: Run) -> None:
        self._logger.close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._logger.close(failed=True)


def _is_kept(row: Mapping[str, Any], run: Run, has_kinds: bool) -> bool:
    """True if a row of an existing file is before the run's position."""
    is_epoch = row["row"] == "epoch" if has_kinds else not run.validate_every.counts_updates
    return int(row["epoch"]) < run.epoch if is_epoch else int(row["update"]) <= run.update


class CsvLog(RowLog):
    """Write `path`, a CSV file with one row per epoch, after each epoch, on rank 0.

    If `validate_every` counts updates, the file has one row per interval. A metric that first appears later gets a
    column. A run that resumes from a checkpoint, or fits again, continues the table: rows of repeated epochs are
    replaced. A new run renames an existing file by adding "-1" before its suffix.

    Raises OSError, on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str] = "epochs.csv") -> None:
        super().__init__(CsvLogger(path), 1)

    def on_update_end(self, run: Run) -> None:
        """Write nothing."""


class JsonLinesLog(RowLog):
    """Append one JSON object per line to `path`, on rank 0: every `every` updates (default 50) and after each epoch.

    "row" is "update", "epoch" or, if `validate_every` counts updates, "interval" in each line. Lines are unbuffered: a
    killed process loses none. A run that resumes from a checkpoint, or fits again, continues the file: lines of
    repeated updates are removed. A new run renames an existing file by adding "-1" before its suffix. Non-finite
    numbers are the strings "nan", "inf" and "-inf", as JSON has none. Raises OSError, on all ranks, and LoopError for
    `every` below 1.
    """

    _has_kinds = True

    def __init__(self, path: str | os.PathLike[str] = "log.jsonl", *, every: int = 50) -> None:
        super().__init__(JsonLinesLogger(path), every)


class TensorBoardLog(RowLog):
    """Log scalars to TensorBoard in `folder`, on rank 0: every `every` updates (default 50) and after each epoch.

    The x axis is always the number of the update. Use one folder per run: TensorBoard hides earlier points after the
    update at which a run starts or resumes, so a resumed run has no duplicate points. Each write is flushed. Raises
    LoopError, on all ranks, if tensorboard is not installed, OSError if the folder cannot be written, and LoopError for
    `every` below 1.
    """

    def __init__(self, folder: str | os.PathLike[str] = "tensorboard", *, every: int = 50) -> None:
        super().__init__(TensorBoardLogger(folder), every)


class _RunLog(RowLog):
    """Base class of logs to a service, whose run continues in later fits and after a resume."""

    @property
    def run_id(self) -> str | None:
        """ID of the run at the service; None before the first fit."""
        found: str | None = self._logger.state_dict()["run_id"]
        return found

    def state_dict(self) -> dict[str, Any]:
        return self._logger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._logger.load_state_dict(state)


class WandbLog(_RunLog):
    """Log to Weights & Biases on rank 0, every `every` updates (default 50) and after each epoch, by update number.

    `options` are passed to `wandb.init`, such as `project="..."` or `mode="offline"`. A run that resumes from a
    checkpoint, or fits again, continues the same W&B run. Raises LoopError, on all ranks, if wandb is not installed,
    and for `every` below 1.
    """

    def __init__(self, *, every: int = 50, **options: Any) -> None:
        super().__init__(WandbLogger(**options), every)


class MLflowLog(_RunLog):
    """Log to an MLflow run on rank 0, every `every` updates (default 50) and after each epoch, by update number.

    `experiment`, `options`: the arguments of `MLflowLogger`. A run that resumes from a checkpoint, or fits again,
    continues the same MLflow run. Raises LoopError, on all ranks, if mlflow is not installed, and for `every` below 1.
    """

    def __init__(self, experiment: str = "Default", *, every: int = 50, **options: Any) -> None:
        super().__init__(MLflowLogger(experiment, **options), every)
