# SPDX-License-Identifier: Apache-2.0
"""A small run on one rank with checkpoints, for the tests here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.format import Checkpoint
from ddpilot.training.loop import Loop

BATCHES = 3
"""Of an epoch: ten samples, four in a batch."""


class Run:
    """A loop with a linear model, momentum and a schedule; `seen` are the samples of each batch."""

    def __init__(self, folder: Path | str, *, num_samples: int = 10, batch_size: int = 4, **options: Any) -> None:
        self.loop = Loop(group=FakeGroup(), checkpoint_dir=folder, **options)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.loop.prepare(self.model, self.optimizer, self.scheduler)
        data = TensorDataset(torch.arange(float(num_samples)).reshape(-1, 1))
        self.loader = self.loop.loader(data, global_batch_size=batch_size)
        self.seen: list[tuple[int, list[float]]] = []

    def read(self, after: Callable[[], None] = lambda: None) -> None:
        """One pass over the data; `after` is called after each update."""
        for (x,) in self.loop.batches(self.loader):
            self.seen.append((self.loop.epoch, x.flatten().tolist()))
            self.loop.backward(self.model(x / 10).square().mean())
            self.loop.step(self.optimizer)
            after()

    def train(self, num_epochs: int, after: Callable[[], None] = lambda: None) -> Run:
        """Epochs of one pass each, with a step of the schedule at the end of each."""
        for _ in self.loop.epochs(num_epochs):
            self.read(after)
            self.scheduler.step()
        return self

    def train_updates(self, num_updates: int) -> Run:
        """Until so many updates in all."""
        for _ in self.loop.epochs(max_updates=num_updates):
            self.read()
        return self


def saved_steps(folder: Path) -> list[int]:
    """The number of updates of each checkpoint, the oldest first."""
    return [int(name.split("-")[-1]) for name in reversed(CheckpointDir(folder).names())]


def latest(folder: Path) -> Checkpoint:
    """What a next run would go on from."""
    found = CheckpointDir(folder).latest()
    assert found is not None
    return found


def position(folder: Path) -> tuple[int, int, int, int]:
    """Epoch, batch, passes and updates of the latest."""
    progress = latest(folder).manifest.progress
    return progress.epoch, progress.batch, progress.passes, progress.step
