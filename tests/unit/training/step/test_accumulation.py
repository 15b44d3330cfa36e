# SPDX-License-Identifier: Apache-2.0
"""Numbers of batches per update that change during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup
from ddpilot.errors import LoopError, MismatchedCheckpointError
from ddpilot.training.loop import Loop
from ddpilot.training.step.accumulation import AccumulationSchedule

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


@pytest.mark.parametrize(
    ("given", "epoch", "update", "size"),
    [
        (3, 7, 70, 3),
        ({0: 1, 5: 4}, 4, 900, 1),
        ({5: 4, 0: 2}, 5, 0, 4),
        ({5: 4}, 0, 0, 1),
        ({0: 2, "500 updates": 8}, 9, 499, 2),
        ({"0 updates": 2, "500 updates": 8}, 0, 500, 8),
        ({"2 epochs": 8}, 2, 0, 8),
        (lambda epoch, update: 1 + epoch + update, 2, 3, 6),
    ],
)
def test_size_at_follows_epochs_or_updates(given: Any, epoch: int, update: int, size: int) -> None:
    """The last number that was reached holds; before the first one it is 1."""
    assert AccumulationSchedule.parse(given, "making a Loop").size_at(epoch, update) == size


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "`accumulate` is 0. Pass 1 or more batches"),
        (True, "`accumulate` is True"),
        ({}, r"`accumulate` is \{\}"),
        ({0: 0}, "`accumulate` has 0 batches from 0 on"),
        ({"5 steps": 2}, """Did you mean "5 updates"?"""),
        ({2: 2, "2 epochs": 3}, "`accumulate` has '2 epochs' twice"),
        ({2: 2, "500 updates": 4}, "`accumulate` counts epochs and updates"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(given: Any, message: str) -> None:
    """Before anything is trained."""
    with pytest.raises(LoopError, match=message):
        Loop(group=FakeGroup(), accumulate=given)


def test_a_function_that_returns_no_number_of_batches_is_named() -> None:
    """With the position that it was called for."""
    with pytest.raises(LoopError, match=r"`accumulate` returned 0\.5 for epoch 1 and update 2"):
        AccumulationSchedule.parse(lambda epoch, update: 0.5, "making a Loop").size_at(1, 2)


def train(accumulate: Any, folder: Path | None = None, stop_at: int = -1) -> list[tuple[int, list[int]]]:
    """The epoch and the batches of each update in three epochs of five batches."""
    loop = Loop(group=FakeGroup(), accumulate=accumulate, checkpoint_dir=folder, progress=False)
    model = nn.Linear(1, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = loop.loader(TensorDataset(torch.ones(10, 1)), global_batch_size=2)
    updates: list[tuple[int, list[int]]] = []
    group: list[int] = []
    for epoch in loop.epochs(3):
        for (x,) in loop.batches(loader):
            assert loop.batch is not None
            group.append(loop.batch.index)
            with loop.accumulate(model):
                loop.backward(model(x).mean())
            if loop.step(optimizer):
                updates.append((epoch, group))
                group = []
            if loop.num_updates == stop_at and loop.is_update:
                loop.stop(everywhere=True)
    loop.release_directory()
    return updates


SCHEDULES: list[Any] = [{0: 1, 1: 2, 2: 5}, {0: 2, "4 updates": 3}, lambda epoch, update: 1 + update % 3]


@pytest.mark.parametrize("accumulate", SCHEDULES)
def test_a_run_that_resumes_within_an_epoch_follows_the_schedule(accumulate: Any, tmp_path: Path) -> None:
    """Stopped after each update: the updates are those of one run."""
    whole = train(accumulate)
    assert whole[-1][0] == 2
    assert sum(len(group) for _, group in whole) == 15
    for stop_at in range(1, len(whole)):
        folder = tmp_path / str(stop_at)
        assert [*train(accumulate, folder, stop_at), *train(accumulate, folder)] == whole


def test_schedules_change_within_an_epoch_by_updates() -> None:
    """By hand: groups of two, of three from the fourth update on."""
    expected = [(0, [0, 1]), (0, [2, 3]), (0, [4]), (1, [0, 1]), (1, [2, 3, 4]), (2, [0, 1, 2]), (2, [3, 4])]
    assert train({0: 2, "4 updates": 3}) == expected


def test_a_different_schedule_within_an_epoch_is_refused(tmp_path: Path) -> None:
    """The rest of the epoch would make different updates."""
    train({0: 2, "4 updates": 3}, tmp_path, stop_at=1)
    with pytest.raises(MismatchedCheckpointError, match="`accumulate` was 2 from 0, 3 from 4 updates, is 2"):
        train(2, tmp_path)
