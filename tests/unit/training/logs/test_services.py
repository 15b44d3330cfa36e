# SPDX-License-Identifier: Apache-2.0
"""Loggers of services: a missing library is named before training, and MLflow's runs continue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddpilot import FakeGroup
from ddpilot.errors import LoopError
from ddpilot.training.logs.logger import Logger
from ddpilot.training.logs.services import MLflowLogger, TensorBoardLogger, WandbLogger
from ddpilot.training.loop import Loop


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
from ddpilot.training.logs.logger import LogStart
from ddpilot.training.logs.services import MLflowLogger
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
