# SPDX-License-Identifier: Apache-2.0
"""`loop.track(per_rank=True)`: each rank saves and restores its own state; another number of ranks needs a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot.errors import MismatchedCheckpointError
from ddpilot.training.loop import Loop
from tests.dist.training.bodies import launch


class Carried:
    """A replay buffer: what this rank has seen."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """The values as a tensor."""
        return {"seen": torch.tensor(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load them."""
        self.seen = state["seen"].tolist()


def redistribute(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Every `world_size`-th value of all."""
    return {"seen": torch.cat([state["seen"] for state in states])[rank::world_size]}


def train(folder: Path, num_epochs: int, divides: bool = False) -> tuple[list[float], str]:
    """Each rank keeps the samples that it has seen; the values at the start, or the error."""
    loop = Loop(checkpoint_dir=folder, progress=False)
    model = loop.prepare(nn.Linear(1, 1))
    optimizer = loop.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    carried = Carried()
    loop.track(carried=carried, per_rank=True, redistribute=redistribute if divides else None)
    try:
        loop.resume()
    except MismatchedCheckpointError as error:
        return [], str(error)
    before = list(carried.seen)
    loader = loop.loader(TensorDataset(torch.arange(6.0).reshape(-1, 1)), global_batch_size=6)
    for _ in loop.epochs(num_epochs):
        for (x,) in loop.batches(loader):
            loop.backward(model(x).mean())
            loop.step(optimizer)
            carried.seen += x[:, 0].tolist()
    return before, ""


def train_twice(folder: Path) -> list[Any]:
    """One epoch, and a second one in a new loop."""
    return [train(folder, 1), train(folder, 2)]


def resume_both_ways(folder: Path) -> list[Any]:
    """Without a function and with one."""
    return [train(folder, 3), train(folder, 3, divides=True)]


def test_each_rank_restores_its_own_state(tmp_path: Path) -> None:
    """At 3 ranks, the state of 2 is refused, on all ranks alike, or redistributed."""
    found = launch(2, train_twice, tmp_path)
    assert [part[1][0] for part in found] == [[0, 1, 2], [3, 4, 5]]
    refused, divided = zip(*launch(3, resume_both_ways, tmp_path), strict=True)
    assert all("'carried' has a state for each of 2 ranks, and there are 3" in error for _, error in refused)
    assert all("redistribute=lambda" in error for _, error in refused)
    assert [values for values, _ in divided] == [[0, 0, 3, 3], [1, 1, 4, 4], [2, 2, 5, 5]]
