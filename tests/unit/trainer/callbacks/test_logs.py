# SPDX-License-Identifier: Apache-2.0
"""Logs: tables, lines and curves that are continued when a run resumes."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.logs import CsvLog, JsonLinesLog, TensorBoardLog, WandbLog
from tests.unit.trainer.callbacks.fits import Each, fit, make_trainer


def read_table(path: Path) -> list[dict[str, str]]:
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
    first, second = read_table(path)
    assert [float(row["loss"]) for row in (first, second)] == [row["loss"] for row in trainer.history.epochs]
    assert (first["nested.a"], second["nested.a"]) == ("0", "1")
    assert (first["late"], second["late"]) == ("", "x,\n'y\"")


def test_csv_log_continues_when_the_same_trainer_fits_again(tmp_path: Path) -> None:
    """One row per epoch; also with a new callback on the same file, as after a restart of the notebook."""
    path = tmp_path / "epochs.csv"
    trainer = fit(make_trainer(CsvLog(path)), 2)
    trainer.callbacks = [CsvLog(path)]
    fit(trainer)
    assert [row["epoch"] for row in read_table(path)] == ["0", "1", "2"]
    assert [path.name for path in tmp_path.iterdir()] == ["epochs.csv"]


def test_csv_log_replaces_rows_of_epochs_that_are_done_again(tmp_path: Path) -> None:
    """After a kill, the run resumes from a checkpoint before the last row."""
    path = tmp_path / "epochs.csv"
    trainer = fit(make_trainer(CsvLog(path)), 3)
    trainer.position = replace(trainer.position, epoch=1, num_updates=3)
    fit(trainer)
    assert [row["epoch"] for row in read_table(path)] == ["0", "1"]


def test_csv_log_moves_the_file_of_an_earlier_run_aside(tmp_path: Path) -> None:
    """Running a cell again never overwrites it."""
    path = tmp_path / "epochs.csv"
    losses = [fit(make_trainer(CsvLog(path)), 1).history.epochs[0]["loss"] for _ in range(3)]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["epochs-1.csv", "epochs-2.csv", "epochs.csv"]
    assert [float(read_table(tmp_path / name)[0]["loss"]) for name in names] == losses


def test_csv_log_raises_when_the_disk_does(tmp_path: Path) -> None:
    """A folder in place of the file: rank 0's OSError ends the fit."""
    path = tmp_path / "epochs.csv"
    trainer = make_trainer(CsvLog(path), Each("on_update_end", lambda run: path.mkdir(exist_ok=True)))
    with pytest.raises(IsADirectoryError):
        fit(trainer)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def list_places(path: Path) -> list[tuple[str, int]]:
    """What each line is about."""
    return [(row["row"], row[row["row"]]) for row in read_lines(path)]


def test_json_lines_log_writes_updates_and_epochs(tmp_path: Path) -> None:
    """Every second update, with other callbacks' values, and each epoch; readable during training."""
    path, seen = tmp_path / "log.jsonl", []
    measure = Each("on_update_end", lambda run: run.values.update(depth=run.update * 10))
    look = Each("on_update_end", lambda run: seen.append(len(read_lines(path))))
    trainer = fit(make_trainer(measure, JsonLinesLog(path, every=2), look), 2)
    assert list_places(path) == [("update", 2), ("epoch", 0), ("update", 4), ("update", 6), ("epoch", 1)]
    assert seen == [0, 1, 1, 3, 3, 4]
    rows = read_lines(path)
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
    assert list_places(path) == [
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
    assert list_places(path) == [("update", 1), ("update", 2)]
    assert log._logger._file is None  # type: ignore[attr-defined]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_json_lines_log_raises_when_the_disk_is_full() -> None:
    """A real ENOSPC at the first line that is due ends the fit with it."""
    with pytest.raises(OSError, match="No space left"):
        fit(make_trainer(JsonLinesLog("/dev/full", every=1)))


def test_json_lines_log_refuses_an_interval_of_no_updates() -> None:
    """With the value."""
    with pytest.raises(LoopError, match="making a JsonLinesLog: `every` is 0"):
        JsonLinesLog(every=0)


needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
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
        Each("on_update_end", lambda run: seen.append(len(read_curves(tmp_path).get("depth", [])))),
    )
    fit(trainer, 2)
    curves = read_curves(tmp_path)
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
    curves = read_curves(tmp_path)
    assert [step for step, _ in curves["batch_loss"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, _ in curves["val_loss"]] == [3, 7]


def test_tensorboard_log_names_a_missing_package_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tensorboard is no dependency."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(LoopError, match="pip install tensorboard; or log to a CSV"):
        fit(make_trainer(TensorBoardLog(tmp_path)))


def test_wandb_log_names_a_missing_package_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb is no dependency."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    trainer = make_trainer(WandbLog())
    with pytest.raises(LoopError, match=r"logging to Weights & Biases: .*pip install wandb"):
        fit(trainer)
    assert not trainer.history.epochs


FITS = """
import json, struct, sys
from pathlib import Path
from ddpilot.trainer.callbacks.logs import WandbLog
from tests.unit.trainer.callbacks.fits import fit, make_trainer

log = WandbLog(every=2, project="test", mode="offline", dir=sys.argv[1])
trainer = fit(make_trainer(log))
first = log.run_id
fit(trainer)

from wandb.proto.wandb_internal_pb2 import Record

rows = []
for path in sorted(Path(sys.argv[1]).rglob("*.wandb")):
    data, place = path.read_bytes(), 7
    while place + 7 <= len(data):  # LevelDB's log: checksum, length and kind before each record, here of one block
        _, length, kind = struct.unpack_from("<IHB", data, place)
        assert kind == 1, kind
        record = Record.FromString(data[place + 7 : place + 7 + length])
        place += 7 + length
        items = record.history.item
        rows += [{".".join(one.nested_key) or one.key: json.loads(one.value_json) for one in items}] if items else []
said = {"ids": [first, log.run_id], "rows": rows, "losses": [row["loss"] for row in trainer.history.epochs]}
print(json.dumps(said))
"""


def test_wandb_log_continues_its_run(tmp_path: Path) -> None:
    """Two fits, one run's id; updates and epochs by the number of the update.

    In a process of its own: W&B leaves threads and files behind.
    """
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed: nothing needs it")
    environ = {**os.environ, "WANDB_SILENT": "true", "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FITS, str(tmp_path)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["ids"][0] == said["ids"][1] is not None
    assert [row["_step"] for row in said["rows"]] == [2, 3, 4, 6]
    assert [row["loss"] for row in said["rows"] if "loss" in row] == said["losses"]
    assert all("batch_loss" in row for row in said["rows"] if row["_step"] != 3)
