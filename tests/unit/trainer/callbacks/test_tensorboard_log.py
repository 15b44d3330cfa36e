# SPDX-License-Identifier: Apache-2.0
"""Curves for TensorBoard, read back by its own reader."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.logs import TensorBoardLog
from tests.unit.trainer.callbacks.fits import Each, fit, make_trainer

needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


@needs_tensorboard
def test_tensorboard_log_has_updates_and_epochs(tmp_path: Path) -> None:
    """By the number of the update; flushed during training."""
    seen: list[Any] = []
    trainer = make_trainer(
        Each("on_update_end", lambda run: run.values.update(depth=run.update * 10)),
        TensorBoardLog(tmp_path, every=2),
        Each("on_update_end", lambda run: seen.append(len(read(tmp_path).get("depth", [])))),
    )
    fit(trainer, 2)
    curves = read(tmp_path)
    assert curves["depth"] == [(2, 20), (4, 40), (6, 60)]
    assert [step for step, _ in curves["loss"]] == [3, 6]
    losses = [row["loss"] for row in trainer.history.epochs]
    assert [value for _, value in curves["loss"]] == pytest.approx(losses)
    assert seen == [0, 1, 1, 2, 2, 3]
    assert "update" not in curves


@needs_tensorboard
def test_tensorboard_log_has_no_duplicate_points_when_a_run_resumes(tmp_path: Path) -> None:
    """Resumed from update 4 of 9: TensorBoard hides later points of the first run."""
    trainer = fit(make_trainer(TensorBoardLog(tmp_path, every=1)), 3)
    trainer.position = replace(trainer.position, epoch=1, num_updates=4)
    fit(trainer)
    curves = read(tmp_path)
    assert [step for step, _ in curves["batch_loss"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, _ in curves["val_loss"]] == [3, 7]


def test_tensorboard_log_names_a_missing_package_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tensorboard is no dependency."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(LoopError, match="pip install tensorboard; or use CsvLog"):
        fit(make_trainer(TensorBoardLog(tmp_path)))
