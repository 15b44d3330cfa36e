# SPDX-License-Identifier: Apache-2.0
"""Loggers that write files: each row survives a kill, and a resumed run continues from its checkpoint."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ddpilot import FakeGroup
from ddpilot.errors import LoopError
from ddpilot.training.logs.loggers import (
    CsvLogger,
    JsonLinesLogger,
    Logger,
    LogStart,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from ddpilot.training.loop import Loop


def start(update: int = 0, keep: int = 0) -> LogStart:
    """A run that starts after so many updates, with so many rows."""
    return LogStart(update=update, is_new=not update, is_kept=lambda index, _: index < keep)


def read(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a file."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(params=["log.csv", "log.jsonl"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Logger]:
    """A path in a folder that does not exist yet, and its logger."""
    path = tmp_path / "new" / request.param
    return path, (CsvLogger if path.suffix == ".csv" else JsonLinesLogger)(path)


def test_rows_are_in_the_file_at_once(log: tuple[Path, Logger]) -> None:
    """A name that appears later gets a column; text with commas and newlines stays one value."""
    path, logger = log
    logger.open(start())
    logger.write("update", {"update": 1, "loss": 0.1}, 1)
    assert [float(row["loss"]) for row in read(path)] == [0.1]
    logger.write("update", {"update": 2, "loss": 1 / 3, "late": "x,\n'y\""}, 2)
    assert [float(row["loss"]) for row in read(path)] == [0.1, 1 / 3]
    assert [row.get("late") or "" for row in read(path)] == ["", "x,\n'y\""]
    logger.close()
    logger.close()


def test_a_resumed_run_removes_rows_after_its_checkpoint(log: tuple[Path, Logger]) -> None:
    """And a line that was cut off by the kill."""
    path, logger = log
    logger.open(start())
    for update in range(1, 5):
        logger.write("update", {"update": update, "loss": update / 10}, update)
    logger.close()
    with path.open("a") as file:
        file.write('{"row": "upd' if path.suffix == ".jsonl" else "5,0.")
    logger.open(start(2, keep=2))
    assert [int(row["update"]) for row in read(path)] == [1, 2]
    logger.write("update", {"update": 3, "loss": 0.3}, 3)
    logger.close()
    assert [float(row["loss"]) for row in read(path)] == [0.1, 0.2, 0.3]
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_new_run_renames_the_file_of_an_earlier_one(log: tuple[Path, Logger]) -> None:
    """No row is ever overwritten by a different run."""
    path, logger = log
    for number in range(3):
        logger.open(start())
        logger.write("update", {"update": number}, number)
        logger.close()
    names = [path.with_name(f"log{suffix}{path.suffix}") for suffix in ("-1", "-2", "")]
    assert [int(read(name)[0]["update"]) for name in names] == [0, 1, 2]


@pytest.mark.parametrize(
    ("module", "logger", "fix"),
    [
        ("torch.utils.tensorboard.writer", TensorBoardLogger(), "pip install tensorboard"),
        ("wandb", WandbLogger(), "pip install wandb"),
        ("mlflow.tracking", MLflowLogger(), "pip install mlflow, or mlflow-skinny"),
    ],
)
def test_a_missing_library_is_named_when_the_loop_is_made(
    module: str, logger: Logger, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is a dependency."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LoopError, match=fix):
        Loop(group=FakeGroup(), loggers=logger)


def test_an_object_that_is_no_logger_is_refused() -> None:
    """Such as a path."""
    with pytest.raises(LoopError, match=r"a str among `loggers`.*CsvLogger"):
        Loop(group=FakeGroup(), loggers=["log.csv"])  # type: ignore[list-item]


RUNS = """
import json, sys
from ddpilot.training.logs.loggers import LogStart
from ddpilot.training.logs.loggers import MLflowLogger
from mlflow.tracking import MlflowClient

logger = MLflowLogger("digits", run_name="first", tracking_uri=sys.argv[1], params={"lr": 0.1})
start = LogStart(update=0, is_new=True, is_kept=lambda *_: True)
logger.open(start)
for update in (1, 2, 3):
    logger.write("update", {"update": update, "epoch": 0, "loss": update / 8, "top:1": 0.5, "text": "x"}, update)
logger.close()
again = MLflowLogger("digits", tracking_uri=sys.argv[1])  # resumed from update 2: update 3 is repeated
again.load_state_dict(logger.state_dict())
again.open(start)
for update in (3, 4):
    again.write("update", {"update": update, "epoch": 0, "loss": update / 8}, update)
again.close(failed=True)
client = MlflowClient(tracking_uri=sys.argv[1])
run = client.get_run(again.run_id)
steps = lambda name: [(one.step, one.value) for one in client.get_metric_history(again.run_id, name)]
history = {name: steps(name) for name in run.data.metrics}
print(json.dumps([logger.run_id == again.run_id, run.info.status, run.info.run_name, run.data.params, history]))
"""


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed: nothing needs it")
def test_mlflow_logger_continues_its_run_without_duplicate_points(tmp_path: Path) -> None:
    """In a process of its own: MLflow takes seconds to import, and leaves threads behind."""
    environ = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RUNS, (tmp_path / "runs").as_uri()]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr
    is_same, status, name, params, history = json.loads(ended.stdout.splitlines()[-1])
    assert (is_same, status, name, params) == (True, "FAILED", "first", {"lr": "0.1"})
    assert history["loss"] == [[1, 0.125], [2, 0.25], [3, 0.375], [4, 0.5]]
    assert history["top_1"] == [[1, 0.5], [2, 0.5], [3, 0.5]]
    assert sorted(history) == ["epoch", "loss", "top_1"]
