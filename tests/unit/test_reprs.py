# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows for an object in the last line of a cell."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ddpilot
from ddpilot import FakeGroup
from ddpilot.training.combined import CombinedLoader
from ddpilot.training.loop import Loop


class Silent(FakeGroup):
    """A group in which a collective is an error."""

    def all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        """Refused."""
        raise AssertionError

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Refused."""
        raise AssertionError


class Numbers(IterableDataset[int]):
    """A stream without a length."""

    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.usefixtures("compiler_is_loaded")
def test_loop_shows_its_rank_and_its_position() -> None:
    """Before and after updates, without a collective and without a device."""
    loop = Loop(group=FakeGroup(), progress=False)
    assert repr(loop) == "Loop(rank 0 of 1 on cpu; epoch 0, 0 updates)"
    model, optimizer = loop.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in loop.batches(loop.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=4)):
        loop.backward(model(x).mean())
        loop.step(optimizer)
    assert repr(loop) == "Loop(rank 0 of 1 on cpu; epoch 0, 2 updates)"
    assert repr(Loop(group=Silent(1, 2), progress=False)) == "Loop(rank 1 of 2 on cpu; epoch 0, 0 updates)"


def test_loaders_show_their_dataset_and_their_batches(tmp_path: Path) -> None:
    """Of every kind; also before a length is known."""
    loop = Loop(group=FakeGroup(1, 2), progress=False)
    data = TensorDataset(torch.ones(10, 1))
    loader = loop.loader(data, global_batch_size=4)
    assert repr(loader) == "MapLoader(TensorDataset, 3 batches of 4 samples, this is rank 1)"
    assert repr(loop.prepare_data_loader(DataLoader(data, 2))).startswith("MapLoader(TensorDataset, 5 batches of 2 sam")
    stream = loop.loader(Numbers(), global_batch_size=2)
    assert repr(stream) == "StreamLoader(Numbers, unknown number of batches of 2 samples, this is rank 1)"
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    shards = ddpilot.JsonLinesShards(tmp_path / "a.jsonl")
    assert repr(shards) == f"JsonLinesShards(1 file, the first: '{tmp_path / 'a.jsonl'}')"
    assert repr(loop.loader(shards, global_batch_size=2)).startswith("ShardLoader(JsonLinesShards, unknown number of ")
    assert repr(CombinedLoader([loader, stream], seed=0)) == f"CombinedLoader({loader!r}, {stream!r})"


def test_folders_and_loggers_show_where_they_write(tmp_path: Path) -> None:
    """The arguments that distinguish them."""
    folder = ddpilot.CheckpointDir(tmp_path, keep=2)
    assert repr(folder) == f"CheckpointDir('{tmp_path}', keep=2)"
    assert repr(ddpilot.CollectiveCheckpoints(FakeGroup(), folder)) == f"CollectiveCheckpoints('{tmp_path}')"
    assert repr(ddpilot.CsvLogger("a.csv")) == "CsvLogger('a.csv')"
    assert repr(ddpilot.JsonLinesLogger("a.jsonl")) == "JsonLinesLogger('a.jsonl')"
    assert repr(ddpilot.TensorBoardLogger("a")) == "TensorBoardLogger('a')"
    assert repr(ddpilot.SlurmLauncher(nodes=2, folder=tmp_path)) == f"SlurmLauncher(nodes=2, folder='{tmp_path}')"


def test_public_classes_do_not_show_an_address() -> None:
    """Except for base classes and for loggers whose options may contain a password."""
    plain = {"Callback", "Logger", "ShardedDataset", "MLflowLogger", "WandbLogger"}
    classes = {name: value for name in ddpilot.__all__ if inspect.isclass(value := getattr(ddpilot, name))}
    assert {name for name, value in classes.items() if value.__repr__ is object.__repr__} == plain
