# SPDX-License-Identifier: Apache-2.0
"""`TensorBoardLogger`, `WandbLogger` and `MLflowLogger`: each imports its library when it is used."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpilot.errors import LoopError
from ddpilot.training.logs.logger import Logger, LogStart, missing_library, numbers


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


class WandbLogger(Logger):
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

    def check(self) -> None:
        self._import()

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

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]


class MLflowLogger(Logger):
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

    def check(self) -> None:
        self._import()

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

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]


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
