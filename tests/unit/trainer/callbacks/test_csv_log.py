# SPDX-License-Identifier: Apache-2.0
"""A table of epochs that is continued when a run resumes."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpilot.trainer.callbacks.logs import CsvLog
from tests.unit.trainer.callbacks.fits import Each, fit, make_trainer


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_log_has_the_rows_of_the_history(tmp_path: Path) -> None:
    """Every number at full precision; nested values and later metrics have columns too."""
    path = tmp_path / "new" / "epochs.csv"

    def add(run: Any) -> None:
        run.metrics["nested"] = {"a": run.epoch}
        if run.epoch:
            run.metrics["late"] = "x,\n'y\""

    trainer = fit(make_trainer(Each("on_evaluate_end", add), CsvLog(path)), 2)
    first, second = read(path)
    assert [float(row["loss"]) for row in (first, second)] == [row["loss"] for row in trainer.history.epochs]
    assert (first["nested.a"], second["nested.a"]) == ("0", "1")
    assert (first["late"], second["late"]) == ("", "x,\n'y\"")


def test_csv_log_continues_when_the_same_trainer_fits_again(tmp_path: Path) -> None:
    """One row per epoch; also with a new callback on the same file, as after a restart of the notebook."""
    path = tmp_path / "epochs.csv"
    trainer = fit(make_trainer(CsvLog(path)), 2)
    trainer.callbacks = [CsvLog(path)]
    fit(trainer)
    assert [row["epoch"] for row in read(path)] == ["0", "1", "2"]
    assert [path.name for path in tmp_path.iterdir()] == ["epochs.csv"]


def test_csv_log_replaces_rows_of_epochs_that_are_done_again(tmp_path: Path) -> None:
    """After a kill, the run resumes from a checkpoint before the last row."""
    path = tmp_path / "epochs.csv"
    trainer = fit(make_trainer(CsvLog(path)), 3)
    trainer.position = replace(trainer.position, epoch=1, num_updates=3)
    fit(trainer)
    assert [row["epoch"] for row in read(path)] == ["0", "1"]


def test_csv_log_moves_the_file_of_an_earlier_run_aside(tmp_path: Path) -> None:
    """Running a cell again never overwrites it."""
    path = tmp_path / "epochs.csv"
    losses = [fit(make_trainer(CsvLog(path)), 1).history.epochs[0]["loss"] for _ in range(3)]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["epochs-1.csv", "epochs-2.csv", "epochs.csv"]
    assert [float(read(tmp_path / name)[0]["loss"]) for name in names] == losses


def test_csv_log_raises_when_the_disk_does(tmp_path: Path) -> None:
    """A folder in place of the file: rank 0's OSError ends the fit."""
    path = tmp_path / "epochs.csv"
    trainer = make_trainer(CsvLog(path), Each("on_update_end", lambda run: path.mkdir(exist_ok=True)))
    with pytest.raises(IsADirectoryError):
        fit(trainer)
