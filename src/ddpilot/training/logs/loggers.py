# SPDX-License-Identifier: Apache-2.0
"""`Logger`, the base class of loggers: CSV and JSON Lines files, TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ddpilot.checkpoint.atomic_files import replace_text
from ddpilot.errors import LoopError


@dataclass(frozen=True, kw_only=True)
class LogStart:
    """The position at which training starts or resumes."""

    update: int
    """Number of updates made before."""
    is_new: bool
    """True for a new run: it does not continue an existing file."""
    is_kept: Callable[[int, Mapping[str, Any]], bool]
    """Called with the index and the contents of each row of an existing file; False for rows to be written again."""


class Logger(ABC):
    """Base class of loggers. Its methods are called on rank 0 only, in the order `check`, `open`, `write`, `close`.

    A logger is pickled and sent to the ranks: open files and import libraries in `open`.
    """

    def check(self) -> None:  # noqa: B027  (most loggers need no more)
        """Raise LoopError if the logger cannot be used here, e.g. because a library is missing."""

    @abstractmethod
    def open(self, start: LogStart) -> None:
        """Open the log, and remove the rows after the position at which the training resumes."""

    @abstractmethod
    def write(self, kind: str, row: Mapping[str, Any], update: int) -> None:
        """Write a row of numbers, strings or lists by name; `update` is the number of updates so far.

        `kind`: "update", "epoch" (also for values that are logged between passes) or "interval".
        """

    def close(self, *, failed: bool = False) -> None:  # noqa: B027
        """Close the log; `failed`: True if training ended with an exception. Idempotent; `open` may follow."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, such as the ID of the run at a service."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Load what `state_dict` returned, before `open`."""


def plain(value: Any) -> Any:
    """Convert a tensor with one element to a number, and other tensors and arrays to lists."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value.tolist() if hasattr(value, "tolist") else value


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of `row` that are numbers, as floats."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}


def finite(value: Any) -> Any:
    """Return `value` with non-finite numbers as the strings "nan", "inf" and "-inf", which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def missing_library(did: str, error: ImportError, fix: str) -> LoopError:
    """Return the error for a logger whose library is not installed."""
    return LoopError(did, found=f"{error}", fix=fix, rank=0)


class CsvLogger(Logger):
    """Write rows to `path`, a CSV file, on rank 0. A name that first appears later gets a column.

    Rows are appended unbuffered, so a killed process loses none. A run that resumes from a checkpoint continues the
    table: rows after the checkpoint are removed. A new run renames an existing file by adding "-1" before its suffix.
    Raises OSError, on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str] = "log.csv") -> None:
        self._path = Path(path)
        self._names: list[str] = []
        self._file: LineFile | None = None

    def __repr__(self) -> str:
        return f"CsvLogger('{self._path}')"

    def open(self, start: LogStart) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if start.is_new:
            rename_existing(self._path)
        self._names = []
        if self._path.exists():
            self._names, rows = self._read()
            self._replace(row for index, row in enumerate(rows) if start.is_kept(index, row))

    def write(self, kind: str, row: Mapping[str, Any], update: int) -> None:
        new = [name for name in row if name not in self._names]
        if new:
            rows = self._read()[1] if self._names else []
            self.close()
            self._names += new
            self._replace(rows)
        if self._file is None:
            self._file = LineFile(self._path)
        self._file.write(_render(self._names, [row]))

    def close(self, *, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> tuple[list[str], list[dict[str, Any]]]:
        """Return the names and rows of the file, without an incomplete last line."""
        text = self._path.read_text(encoding="utf-8")
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        rows = list(reader)
        return list(reader.fieldnames or ()), rows

    def _replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        replace_text(self._path, f"{_render(self._names, [dict(zip(self._names, self._names, strict=True)), *rows])}\n")


def _render(names: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the lines of a table, without the last newline."""
    table = io.StringIO(newline="")
    csv.DictWriter(table, names, lineterminator="\n", extrasaction="ignore").writerows(rows)
    return table.getvalue().removesuffix("\n")


class JsonLinesLogger(Logger):
    """Append one JSON object per row to `path`, on rank 0.

    "row" is "update", "epoch" or "interval" in each line. Lines are unbuffered: a killed process loses none. A run that
    resumes from a checkpoint continues the file: lines after the checkpoint are removed. A new run renames an existing
    file by adding "-1" before its suffix. Non-finite numbers are the strings "nan", "inf" and "-inf", as JSON has none.
    Raises OSError, on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str] = "log.jsonl") -> None:
        self._path = Path(path)
        self._file: LineFile | None = None

    def __repr__(self) -> str:
        return f"JsonLinesLogger('{self._path}')"

    def open(self, start: LogStart) -> None:
        if start.is_new:
            rename_existing(self._path)
        rows = count()

        def is_kept(line: str) -> bool:
            try:
                row = json.loads(line)
                return start.is_kept(next(rows), row) if isinstance(row, dict) and "row" in row else True
            except (ValueError, KeyError, TypeError):  # not a line of this log
                return True

        self._file = LineFile(self._path, keep=is_kept)

    def write(self, kind: str, row: Mapping[str, Any], update: int) -> None:
        assert self._file is not None  # opened before
        self._file.write(json.dumps(finite({"row": kind, **row}), allow_nan=False, default=str))

    def close(self, *, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class LineFile:
    """Append lines to `path`, unbuffered: errors raise OSError immediately; a killed process loses no written line."""

    def __init__(self, path: Path, *, keep: Callable[[str], bool] | None = None) -> None:
        """Open the file. `keep`: removes the lines for which it returns False, and an incomplete last line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep is not None and path.is_file():  # a pipe or a terminal has no lines to keep
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


class TensorBoardLogger(Logger):
    """Log scalars to TensorBoard in `folder`, on rank 0; the x axis is the number of the update.

    Use one folder per run: TensorBoard hides earlier points after the update at which a run starts or resumes, so a
    resumed run has no duplicate points. Each write is flushed. Raises LoopError, on all ranks, if tensorboard is not
    installed, and OSError if the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str] = "tensorboard") -> None:
        self._folder = Path(folder)
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoardLogger('{self._folder}')"

    def check(self) -> None:
        self._import()

    def _import(self) -> Any:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            fix = "pip install tensorboard; or log to a CSV or JSON lines file."
            raise missing_library("writing for TensorBoard", error, fix) from error
        return SummaryWriter

    def open(self, start: LogStart) -> None:
        self._writer = self._import()(str(self._folder), purge_step=start.update + 1)

    def write(self, kind: str, row: Mapping[str, Any], update: int) -> None:
        for name, value in numbers(row).items():
            if name != "update":
                self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _RunLogger(Logger):
    """Base class of loggers to a service, whose run continues after a resume."""

    run_id: str | None

    def check(self) -> None:
        self._import()

    def _import(self) -> Any:
        """Return what is needed of the library. Raises LoopError if it is not installed."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]


class WandbLogger(_RunLogger):
    """Log to Weights & Biases on rank 0, by update number.

    `options` are passed to `wandb.init`, such as `project="..."` or `mode="offline"`. A run that resumes from a
    checkpoint continues the same W&B run; for repeated updates, W&B keeps the first values. Raises LoopError, on all
    ranks, if wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None
        self.run_id: str | None = None
        """ID of the W&B run; None before it is opened."""

    def _import(self) -> Any:
        try:
            import wandb
        except ImportError as error:
            raise missing_library("logging to Weights & Biases", error, "pip install wandb.") from error
        return wandb

    def open(self, start: LogStart) -> None:
        again = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
        self._run = self._import().init(**{**self._options, **again})
        self.run_id = self._run.id

    def write(self, kind: str, row: Mapping[str, Any], update: int) -> None:
        self._run.log(numbers(row), step=update)

    def close(self, *, failed: bool = False) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None


class MLflowLogger(_RunLogger):
    """Log to an MLflow run on rank 0, by update number.

    - `experiment`: name of the experiment; created if it does not exist.
    - `run_name`, `params`: name and parameters of the run.
    - `tracking_uri`: the server or store; None: MLflow's own setting.

    A run that resumes from a checkpoint continues the same MLflow run; for repeated updates, the first values are kept.
    Raises LoopError, on all ranks, if mlflow is not installed, and the exceptions of MLflow.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self._experiment = experiment
        self._run_name = run_name
        self._uri = tracking_uri
        self._params = dict(params or {})
        self._client: Any = None
        self._last: dict[str, int] = {}
        """Update of the last value of each metric that an earlier part of the training has logged."""
        self.run_id: str | None = None
        """ID of the MLflow run; None before it is opened."""

    def _import(self) -> tuple[Any, Any, Any]:
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing_library("logging to MLflow", error, "pip install mlflow, or mlflow-skinny.") from error
        return MlflowClient, Metric, Param

    def open(self, start: LogStart) -> None:
        make_client, _, make_param = self._import()
        self._client = make_client(tracking_uri=self._uri)
        if self.run_id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
            self.run_id = self._client.create_run(number, run_name=self._run_name).info.run_id
            params = [make_param(name, str(value)) for name, value in self._params.items()]
            self._client.log_batch(self.run_id, params=params)
        else:
            self._client.update_run(self.run_id, status="RUNNING")
        known = self._client.get_run(self.run_id).data.metrics
        self._last = {name: self._last_step(name) for name in known}

    def _last_step(self, name: str) -> int:
        steps: list[int] = [one.step for one in self._client.get_metric_history(self.run_id, name)]
        return max(steps)

    def write(self, kind: str, row: Mapping[str, Any], update: int) -> None:
        _, make_metric, _ = self._import()
        now_ms = int(time.time() * 1e3)
        metrics = [
            make_metric(_metric_name(name), value, now_ms, update)
            for name, value in numbers(row).items()
            if name != "update" and update > self._last.get(_metric_name(name), -1)
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def close(self, *, failed: bool = False) -> None:
        if self._client is not None:
            self._client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")
            self._client = None


def _metric_name(name: str) -> str:
    """Return `name` with characters that MLflow refuses replaced by "_"."""
    return "".join(one if one.isalnum() or one in "_-. /" else "_" for one in name)


def check_loggers(loggers: object) -> tuple[Logger, ...]:
    """Return `loggers` as a tuple. Raises LoopError for other objects."""
    given = tuple(loggers) if isinstance(loggers, list | tuple) else (loggers,)
    for one in given:
        if not isinstance(one, Logger):
            found = f"a {type(one).__name__} among `loggers`"
            raise LoopError("making a Loop", found=found, fix='Pass loggers: loggers=[ddpilot.CsvLogger("log.csv")].')
    return given
