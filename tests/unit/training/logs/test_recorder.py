# SPDX-License-Identifier: Apache-2.0
"""`Loop.log` on one rank: rows, reductions, what is refused, and a resume that writes each row once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup
from ddpilot.errors import LoopError
from ddpilot.training.logs.loggers import JsonLinesLogger, Logger, LogStart
from ddpilot.training.loop import Loop

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")
CLOCKED = ("samples_per_s", "data_wait", "tokens_per_s", "flops_per_s", "mfu")


class Kept(Logger):
    """Keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []
        self.events: list[str] = []

    def open(self, start: LogStart) -> None:
        self.events.append("open")

    def write(self, kind: str, row: Mapping[str, Any], update: int) -> None:
        self.rows.append((kind, {name: value for name, value in row.items() if name not in CLOCKED}))

    def close(self, *, failed: bool = False) -> None:
        self.events.append(f"close {failed}")


def make(num_samples: int = 10, **options: Any) -> tuple[Loop, Any, Any, Any]:
    """A loop alone, with a loader of batches of four: three updates per epoch."""
    loop = Loop(group=FakeGroup(), **options)
    model = nn.Linear(1, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = TensorDataset(torch.arange(float(num_samples)).reshape(-1, 1))
    return loop, model, optimizer, loop.loader(data, global_batch_size=4)


def step(loop: Loop, model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    """An update; the loss."""
    with loop.accumulate(model):
        loss: torch.Tensor = model(x).square().mean()
        loop.backward(loss)
    loop.step(optimizer)
    return loss


def test_rows_are_means_over_samples_since_the_last_row() -> None:
    """At every second update and at the end of a pass, whose last batch has two samples."""
    kept = Kept()
    loop, model, optimizer, loader = make(loggers=kept, log_every=2)
    for _ in loop.epochs(2):
        for (x,) in loop.batches(loader):
            step(loop, model, optimizer, x)
            loop.log({"mean": x.mean(), "items": (x.mean() * 2, 3)})
            loop.log({"low": x.min()}, reduce="min")
            loop.log({"high": x.max().item()}, reduce="max")
            loop.log({"sum": x.sum()}, reduce="sum")
            loop.log({"lr": 0.1 * loop.num_updates}, reduce="last")
        loop.log({"val": 7})
    rows = [row for _, row in kept.rows]
    assert [(kind, row["epoch"], row["update"]) for kind, row in kept.rows] == [
        *[("update", 0, 2), ("update", 0, 3), ("epoch", 0, 3)],
        *[("update", 1, 4), ("update", 1, 6), ("epoch", 1, 6)],
    ]
    assert [row["mean"] for row in rows if "mean" in row] == [3.5, 8.5, 1.5, (4 * 5.5 + 2 * 8.5) / 6]
    assert [row["items"] for row in rows if "items" in row] == [7.0, 17.0, 3.0, 14.0]
    assert [(row["low"], row["high"], row["sum"]) for row in rows if "sum" in row][:2] == [(0, 7, 28), (8, 9, 17)]
    assert rows[0]["lr"] == pytest.approx(0.1 * 2)
    assert rows[2] == {"epoch": 0, "update": 3, "val": 7.0}
    assert kept.events == ["open", "close False"]
    loop.log({"test": 8})
    assert kept.rows[-1] == ("epoch", {"epoch": 2, "update": 6, "test": 8.0})
    assert kept.events[2:] == ["open", "close False"]


def test_rates_are_sums_divided_by_the_time() -> None:
    """Tokens and FLOPs of a batch; the share of a peak that is given."""
    loop, model, optimizer, loader = make()
    loop.peak_flops = 1e3
    for (x,) in loop.batches(loader):
        step(loop, model, optimizer, x)
        loop.log({}, per_s={"tokens": 5 * len(x), "flops": 100 * len(x)})
    found = loop.take_logged()
    assert found["tokens_per_s"] == pytest.approx(5 * found["samples_per_s"])
    assert found["mfu"] == pytest.approx(100 * found["samples_per_s"] / 1e3)
    assert 0 <= found["data_wait"] <= 1
    assert "tokens_per_s" not in loop.take_logged()


def test_a_logger_closes_as_failed_when_training_fails() -> None:
    """With the rows before."""
    kept = Kept()
    loop, model, optimizer, loader = make(loggers=kept, log_every=1)

    def train() -> None:
        for _ in loop.epochs(2):
            for (x,) in loop.batches(loader):
                loop.log({"loss": step(loop, model, optimizer, x)})
                if loop.num_updates == 3:
                    raise ValueError("as a user's code may")

    with pytest.raises(ValueError, match="as a user's"):
        train()
    assert len(kept.rows) == 2
    assert kept.events == ["open", "close True"]


@pytest.mark.parametrize(
    ("values", "options", "match"),
    [
        ({"loss": torch.ones(2)}, {}, r"a tensor of shape \(2,\) as 'loss'"),
        ({"loss": "low"}, {}, "'low' as 'loss'"),
        ({"epoch": 3}, {}, "a value called 'epoch'"),
        ({"a": 1}, {"reduce": "avg"}, "`reduce` is 'avg'. Use 'mean', 'sum'"),
        ({"a": (1, 2)}, {"reduce": "sum"}, "'a' with a count and reduce='sum'"),
    ],
)
def test_values_that_cannot_be_logged_are_refused(values: Any, options: Any, match: str) -> None:
    """With the value, in a batch."""
    loop, _, _, loader = make()
    for _ in loop.batches(loader):
        with pytest.raises(LoopError, match=match):
            loop.log(values, **options)
        break


def test_log_refuses_two_reductions_of_a_name_and_rates_between_passes() -> None:
    """Which number would be meant?"""
    loop, _, _, loader = make()
    for _ in loop.batches(loader):
        loop.log({"a": 1})
        with pytest.raises(LoopError, match="'a' with reduce='max' after reduce='mean'"):
            loop.log({"a": 1}, reduce="max")
        break
    with pytest.raises(LoopError, match="`per_s` outside of `batches`"):
        loop.log({}, per_s={"tokens": 1})
    with pytest.raises(LoopError, match="`log_every` is 0"):
        make(log_every=0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_training() -> None:
    """With a real ENOSPC, at the next row."""
    loop, model, optimizer, loader = make(loggers=JsonLinesLogger("/dev/full"), log_every=1)

    def train_on() -> None:
        for (x,) in loop.batches(loader):
            loop.log({"loss": step(loop, model, optimizer, x)})

    with pytest.raises(OSError, match="No space left"):
        train_on()


class KilledError(Exception):
    """In place of a kill."""


def train(folder: Path, stop_at: int | None = None, **options: Any) -> list[dict[str, Any]]:
    """Three epochs with checkpoints; killed without a word after update `stop_at`. The rows of the file."""
    path = folder / "log.jsonl"
    loop, model, optimizer, loader = make(
        18, loggers=JsonLinesLogger(path), log_every=2, checkpoint_dir=folder / "ckpt", progress=False, **options
    )

    try:
        for _ in loop.epochs(3):
            for (x,) in loop.batches(loader):
                loop.log({"loss": step(loop, model, optimizer, x)})
                loop.log({"sum": x.sum()}, reduce="sum")
                if loop.num_updates == stop_at:
                    raise KilledError
            loop.log({"val": model.weight.item()})
        loop.log({"test": 1})
    except KilledError:
        pass
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in CLOCKED} for row in lines]


@pytest.mark.parametrize("save_every", [1, 2, 3])
def test_a_resumed_run_writes_the_rows_of_one_that_was_not_interrupted(save_every: int, tmp_path: Path) -> None:
    """Killed after rows that are later than the checkpoint, and in the middle of rows and at ends of epochs."""
    expected = train(tmp_path / "whole")
    assert [row["update"] for row in expected] == [2, 4, 5, 5, 6, 8, 10, 10, 12, 14, 15, 15, 15]
    for stop_at in (1, 4, 5, 8, 10, 14, 15):
        folder = tmp_path / f"{stop_at}"
        train(folder, stop_at, save_every_updates=save_every)
        assert train(folder, save_every_updates=save_every) == expected, stop_at
        assert train(folder, save_every_updates=save_every) == expected, "of a run that is finished"
