# SPDX-License-Identifier: Apache-2.0
"""Logs of updates and epochs: `CsvLog`, `JsonLinesLog`, `TensorBoardLog` and `WandbLog`."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch

from ddpilot.checkpoint.atomic_files import replace_text
from ddpilot.errors import LoopError
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.history import flatten
from ddpilot.trainer.run import Run


def update_row(run: Run) -> dict[str, Any]:
    """Return the row of the current update: "batch_loss", this rank's mean of the batch, and callbacks' measurements.

    Waits for the device if it is still computing them.
    """
    row = {"epoch": run.epoch, "update": run.update, "batch_loss": run.loss, **run.values}
    return {name: plain(value) for name, value in row.items() if value is not None}


def epoch_row(run: Run) -> dict[str, Any]:
    """Return the row of the current epoch or interval, with nested dicts flattened to "name.key"."""
    return {name: plain(value) for name, value in flatten(run.metrics).items()}


def plain(value: Any) -> Any:
    """Convert a tensor with one element to a number, and other tensors and arrays to lists."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value.tolist() if hasattr(value, "tolist") else value


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of `row` that are numbers, as floats."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}


def check_every(name: str, every: int) -> int:
    """Return `every`, a number of updates. Raises LoopError below 1."""
    if every < 1:
        raise LoopError(f"making a {name}", found=f"`every` is {every}", fix="Give a number of updates, 1 or more.")
    return every


class RowLog(Callback, ABC):
    """Base class of logs of updates and epochs: calls `_write` with each row, and `_close` when the fit ends.

    If intervals of updates are validated, epochs are logged too only if `_has_kinds`: they have the same names.
    """

    _has_kinds: ClassVar[bool] = False
    """True if each row has its kind."""

    def __init__(self, every: int) -> None:
        self._every = check_every(type(self).__name__, every)

    def on_update_end(self, run: Run) -> None:
        if run.update % self._every == 0:
            self._write("update", update_row(run), run.update)

    def on_epoch_end(self, run: Run) -> None:
        if self._has_kinds or not run.validate_every.counts_updates:
            self._write("epoch", epoch_row(run), run.update)

    def on_interval_end(self, run: Run) -> None:
        self._write("interval", epoch_row(run), run.update)

    def on_fit_end(self, run: Run) -> None:
        self._close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._close(failed=True)

    @abstractmethod
    def _write(self, kind: str, row: dict[str, Any], update: int) -> None:
        """Write a row of this kind ("update", "epoch" or "interval"), after so many updates."""

    def _close(self, *, failed: bool = False) -> None:
        """Close the log. Idempotent."""


class CsvLog(Callback):
    """Write `path`, a CSV file with one row per epoch, after each epoch, on rank 0.

    If `validate_every` counts updates, one row per interval.

    The file is replaced atomically, so it is always complete, and a metric that first appears later gets a column. A
    run that resumes from a checkpoint, or fits again, continues the table: rows of repeated epochs are replaced. A new
    run renames an existing file by adding "-1" before its suffix. Raises OSError, on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str] = "epochs.csv") -> None:
        self._path = Path(path)
        self._rows: list[dict[str, Any]] = []

    def on_fit_start(self, run: Run) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not run.update:
            rename_existing(self._path)
        self._rows = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                self._rows = [row for row in csv.DictReader(file) if _is_kept(row, run)]

    def on_epoch_end(self, run: Run) -> None:
        if not run.validate_every.counts_updates:
            self._add(run)

    def on_interval_end(self, run: Run) -> None:
        self._add(run)

    def _add(self, run: Run) -> None:
        self._rows.append(epoch_row(run))
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        replace_text(self._path, table.getvalue())


def _is_kept(row: Mapping[str, str], run: Run) -> bool:
    """True if a row of the table is before the run's position."""
    if run.validate_every.counts_updates:
        return int(row["update"]) <= run.update
    return int(row["epoch"]) < run.epoch


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
        super().__init__(every)
        self._path = Path(path)
        self._file: LineFile | None = None

    def on_fit_start(self, run: Run) -> None:
        if not run.update:
            rename_existing(self._path)
        self._file = LineFile(self._path, keep=lambda line: _is_before(line, run))

    def _write(self, kind: str, row: dict[str, Any], update: int) -> None:
        assert self._file is not None  # opened in on_fit_start()
        self._file.write(json.dumps(_finite({"row": kind, **row}), allow_nan=False, default=str))

    def _close(self, *, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_before(line: str, run: Run) -> bool:
    """True if a line precedes the run's position, or is not a line of this log."""
    try:
        row = json.loads(line)
        is_epoch, number = row["row"] == "epoch", row["epoch"] if row["row"] == "epoch" else row["update"]
    except (ValueError, KeyError, TypeError):
        return True
    return bool(number < run.epoch if is_epoch else number <= run.update)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoardLog(RowLog):
    """Log scalars to TensorBoard in `folder`, on rank 0: every `every` updates (default 50) and after each epoch.

    The x axis is always the number of the update. Use one folder per run: TensorBoard hides earlier points after the
    update at which a run starts or resumes, so a resumed run has no duplicate points. Each write is flushed. Raises
    LoopError, on all ranks, if tensorboard is not installed, OSError if the folder cannot be written, and LoopError for
    `every` below 1.
    """

    def __init__(self, folder: str | os.PathLike[str] = "tensorboard", *, every: int = 50) -> None:
        super().__init__(every)
        self._folder = Path(folder)
        self._writer: Any = None

    def on_fit_start(self, run: Run) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise LoopError(
                "writing for TensorBoard",
                found=f"{error}",
                fix="pip install tensorboard; or use CsvLog or JsonLinesLog.",
                rank=run.loop.rank,
            ) from error
        self._writer = SummaryWriter(str(self._folder), purge_step=run.update + 1)

    def _write(self, kind: str, row: dict[str, Any], update: int) -> None:
        for name, value in numbers(row).items():
            if name != "update":
                self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def _close(self, *, failed: bool = False) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbLog(RowLog):
    """Log to Weights & Biases on rank 0, every `every` updates (default 50) and after each epoch, by update number.

    `options` are passed to `wandb.init`, such as `project="..."` or `mode="offline"`. A run that resumes from a
    checkpoint, or fits again, continues the same W&B run. Raises LoopError, on all ranks, if wandb is not installed,
    and for `every` below 1.
    """

    def __init__(self, *, every: int = 50, **options: Any) -> None:
        super().__init__(every)
        self._options = options
        self._run: Any = None
        self.run_id: str | None = None
        """ID of the W&B run; None before the first fit."""

    def on_fit_start(self, run: Run) -> None:
        try:
            import wandb
        except ImportError as error:
            raise LoopError(
                "logging to Weights & Biases", found=f"{error}", fix="pip install wandb.", rank=run.loop.rank
            ) from error
        again = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
        self._run = wandb.init(**{**self._options, **again})
        self.run_id = self._run.id

    def _write(self, kind: str, row: dict[str, Any], update: int) -> None:
        self._run.log(numbers(row), step=update)

    def _close(self, *, failed: bool = False) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None


class LineFile:
    """Append lines to `path`, unbuffered: errors raise OSError immediately; a killed process loses no written line."""

    def __init__(self, path: Path, *, keep: Callable[[str], bool]) -> None:
        """Open the file and keep those of its lines for which `keep` returns True, without an incomplete last line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():  # a pipe or a terminal has no lines to keep
            *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
            replace_text(path, "".join(f"{line}\n" for line in lines if keep(line)))
        self._file: io.FileIO | None = io.FileIO(path, "a")

    def write(self, line: str) -> None:
        """Append `line` and a newline."""
        data = f"{line}\n".encode()
        while data and self._file is not None:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def rename_existing(path: Path) -> None:
    """Rename an earlier run's file at `path`, if there is one, to the first free name of name-1, name-2, ..."""
    if path.is_file():
        names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
        path.rename(next(name for name in names if not name.exists()))
