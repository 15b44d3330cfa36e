# SPDX-License-Identifier: Apache-2.0
"""`Loop.log` on several ranks: the rows of one process, also when resumed at another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot.errors import LoopError, RemoteRankError
from ddpilot.training.logs.loggers import JsonLinesLogger
from ddpilot.training.loop import Loop
from tests.dist.training.bodies import launch

CLOCKED = ("samples_per_s", "data_wait", "tokens_per_s")


def train(folder: Path, max_updates: int, stop_at: int | None = None) -> None:
    """Batches of four and two samples: one rank of three has none of the last one."""
    loop = Loop(
        seed=1,
        checkpoint_dir=folder / "ckpt",
        loggers=JsonLinesLogger(folder / "log.jsonl"),
        log_every=3,
        progress=False,
    )
    model = nn.Linear(3, 1).double()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, 42, dtype=torch.float64).reshape(14, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    loader = loop.loader(data, global_batch_size=4, shuffle=True)
    for _ in loop.epochs(max_updates=max_updates):
        for x, y in loop.batches(loader):
            with loop.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                loop.backward(loss)
            loop.step(optimizer)
            num = float((x > 0).sum())
            loop.log({"loss": loss, "masked": (x[x > 0].mean(), num)}, per_s={"tokens": num})
            loop.log(
                {"tokens": num, "top": x.sum(1).max() if len(x) else 0.0}, reduce="sum" if loop.epoch > 9 else "mean"
            )
            loop.log({"low": x.min() if len(x) else float("nan")}, reduce="min")
            if loop.num_updates == stop_at:
                loop.stop(everywhere=True)
        if not loop.next_batch:
            loop.log(loop.evaluate(model, loader, {"error": lambda output, y: (output - y).abs()}))
            loop.log({"by_count": (float(loop.rank), loop.rank)})


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows, without what a clock measured or depends on the number of ranks by its meaning."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    left_out = (*CLOCKED, "tokens", "top", "by_count")
    return [{name: value for name, value in row.items() if name not in left_out} for row in lines]


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The rows are equal to 1e-10."""
    assert [(row["row"], row["update"], list(row)) for row in found] == [
        (row["row"], row["update"], list(row)) for row in expected
    ]
    for row, other in zip(found, expected, strict=True):
        assert {**row, "row": 0} == pytest.approx({**other, "row": 0}, rel=1e-10)


def refused(folder: Path) -> list[str]:
    """What each rank is told."""
    found = []
    loop = Loop(loggers=JsonLinesLogger(folder / "refused.jsonl"), progress=False)
    try:
        loop.log({"time": 1.0 + loop.rank})
    except LoopError as error:
        found.append(str(error))
    loop.log({"time": 1.0 + loop.rank}, reduce="max")
    kinds: tuple[type[Exception], ...] = (OSError, RemoteRankError)
    try:
        Loop(loggers=JsonLinesLogger(folder / "refused.jsonl" / "below"), progress=False).log({"a": 1})
    except kinds as error:
        found.append(type(error).__name__)
    loader = loop.loader(TensorDataset(torch.zeros(6, 1)), global_batch_size=3)
    for _ in loop.batches(loader):
        if loop.rank == 0:
            loop.log({"loss": 1.0})
    loop.take_logged()
    return found


def body(folder: Path, parts: list[int]) -> list[str]:
    """A training in parts, and what is refused."""
    for max_updates in parts:
        train(folder, max_updates)
    return refused(folder)


def test_logs_are_those_of_one_process_at_any_number_of_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Means over samples and over counts, also where a rank has none; what would be wrong is refused or reported."""
    folders = {name: tmp_path / name for name in ("one", "three")}
    launch(1, body, folders["one"], [11])
    told = launch(3, body, folders["three"], [11])
    expected = read(folders["one"])
    assert [(row["row"], row["update"]) for row in expected if "error" in row or "loss" in row] == [
        *[("update", 3), ("update", 4), ("epoch", 4), ("update", 6), ("update", 8), ("epoch", 8), ("update", 9)],
        ("update", 11),
    ]
    found = read(folders["three"])
    assert_equal(found, expected)
    assert [each[1] for each in told] == ["FileExistsError", "RemoteRankError", "RemoteRankError"]
    assert all("'time' is 1 on rank 0 and 3 on rank 2" in each[0] for each in told)
    assert "only rank 0 has logged 'loss'" in capfd.readouterr().err
    weighted = [
        row["by_count"] for row in map(json.loads, (folders["three"] / "log.jsonl").open()) if "by_count" in row
    ]
    assert weighted == pytest.approx([(1 + 4) / 3] * 2)


def test_logs_continue_at_another_number_of_ranks(tmp_path: Path) -> None:
    """All ranks stop two updates into a row: the rest of it is trained by a different number of ranks."""
    launch(1, train, tmp_path / "whole", 11)
    for number, stop_at in ((3, 5), (1, None)):
        launch(number, train, tmp_path / "parts", 11, stop_at)
    assert_equal(read(tmp_path / "parts"), read(tmp_path / "whole"))
