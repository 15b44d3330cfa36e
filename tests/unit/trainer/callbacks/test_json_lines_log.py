# SPDX-License-Identifier: Apache-2.0
"""JSON Lines: unbuffered, and without duplicates after resuming."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.logs import JsonLinesLog
from tests.unit.trainer.callbacks.fits import Each, fit, make_trainer


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def places(path: Path) -> list[tuple[str, int]]:
    """What each line is about."""
    return [(row["row"], row[row["row"]]) for row in read(path)]


def test_json_lines_log_writes_updates_and_epochs(tmp_path: Path) -> None:
    """Every second update, with other callbacks' values, and each epoch; readable during training."""
    path, seen = tmp_path / "log.jsonl", []
    measure = Each("on_update_end", lambda run: run.values.update(depth=run.update * 10))
    look = Each("on_update_end", lambda run: seen.append(len(read(path))))
    trainer = fit(make_trainer(measure, JsonLinesLog(path, every=2), look), 2)
    assert places(path) == [("update", 2), ("epoch", 0), ("update", 4), ("update", 6), ("epoch", 1)]
    assert seen == [0, 1, 1, 3, 3, 4]
    rows = read(path)
    assert [row["depth"] for row in rows if row["row"] == "update"] == [20, 40, 60]
    assert [row["val_loss"] for row in rows if row["row"] == "epoch"] == [e["val_loss"] for e in trainer.history.epochs]


def test_json_lines_log_removes_lines_of_repeated_updates(tmp_path: Path) -> None:
    """A run resumes from update 4, in the middle of epoch 1: later and incomplete lines are removed, others kept."""
    path = tmp_path / "log.jsonl"
    trainer = fit(make_trainer(JsonLinesLog(path, every=1)), 3)
    with path.open("a") as file:
        file.write('not ours\n{"row": "upda')
    trainer.position = replace(trainer.position, epoch=1, num_updates=4)
    fit(trainer)
    lines = path.read_text().splitlines()
    assert lines.pop(lines.index("not ours"))
    path.write_text("\n".join(lines))
    assert places(path) == [
        *[("update", 1), ("update", 2), ("update", 3), ("epoch", 0), ("update", 4)],
        *[("update", 5), ("update", 6), ("update", 7), ("epoch", 1)],
    ]


def test_json_lines_log_is_json_when_a_loss_is_not_finite(tmp_path: Path) -> None:
    """JSON has no NaN; a strict reader reads the line."""
    path = tmp_path / "log.jsonl"
    values = {"a": float("nan"), "b": [float("-inf"), 1.0]}
    fit(make_trainer(Each("on_evaluate_end", lambda run: run.metrics.update(values)), JsonLinesLog(path)))

    def refuse(text: str) -> None:
        raise AssertionError(text)

    (line,) = path.read_text().splitlines()
    row = json.loads(line, parse_constant=refuse)
    assert (row["a"], row["b"]) == ("nan", ["-inf", 1.0])


def test_json_lines_log_closes_its_file_when_training_fails(tmp_path: Path) -> None:
    """The lines before are there."""
    path = tmp_path / "log.jsonl"

    def fail(run: Any) -> None:
        if run.update == 2:
            raise ValueError("as a user's callback may")

    log = JsonLinesLog(path, every=1)
    with pytest.raises(ValueError, match="as a user's"):
        fit(make_trainer(log, Each("on_update_end", fail)))
    assert places(path) == [("update", 1), ("update", 2)]
    assert log._file is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_json_lines_log_raises_when_the_disk_is_full() -> None:
    """A real ENOSPC at the first line that is due ends the fit with it."""
    with pytest.raises(OSError, match="No space left"):
        fit(make_trainer(JsonLinesLog("/dev/full", every=1)))


def test_json_lines_log_refuses_an_interval_of_no_updates() -> None:
    """With the value."""
    with pytest.raises(LoopError, match="making a JsonLinesLog: `every` is 0"):
        JsonLinesLog(every=0)
