# SPDX-License-Identifier: Apache-2.0
"""Loggers that write files: each row survives a kill, and a resumed run continues from its checkpoint."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpilot.training.logs.files import CsvLogger, JsonLinesLogger
from ddpilot.training.logs.logger import Logger, LogStart


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
