# SPDX-License-Identifier: Apache-2.0
"""What averages of weights refuse, and when they are updated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import ddpilot
from ddpilot import Averaging, FakeGroup
from ddpilot.errors import LoopError
from ddpilot.training.loop import Loop
from ddpilot.training.step.weight_averages import WeightAverage

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")
DATA = TensorDataset(torch.ones(5, 1), torch.ones(5, 1))


class Endless(IterableDataset[Any]):
    """Without an end."""

    def __iter__(self) -> Iterator[Any]:
        return ((torch.ones(1), torch.ones(1)) for _ in itertools.count())


def make_normed() -> nn.Module:
    """With a BatchNorm."""
    return nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.5}, "`decay` is 1.5. Give a decay between 0 and 1"),
        ({"start": "3 steps"}, """`start` is '3 steps'. Did you mean "3 updates"?"""),
        ({"every": 0}, "`every` is 0"),
        ({"batch_norm_batches": -1}, "`batch_norm_batches` is -1"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    """As they are made."""
    with pytest.raises(LoopError, match=message):
        Averaging(**options)


def test_a_loop_averages_prepared_models_only() -> None:
    """Ranks may have different weights before."""
    with pytest.raises(LoopError, match=r"a Linear that was not prepared. Write model = loop.prepare\(model\) first"):
        Loop(group=FakeGroup()).average(nn.Linear(1, 1), 0.9)


def test_batch_norm_statistics_of_a_single_value_are_refused() -> None:
    """As torch refuses it; the mode and the forward of each layer are as before."""
    loop = Loop(group=FakeGroup(), progress=False)
    model = loop.prepare(make_normed().eval())
    loader = loop.loader(DATA, global_batch_size=4)
    with pytest.raises(LoopError, match="batch 1 has a single value per channel on all ranks together"):
        loop.update_batch_norm(model, loader)
    assert not any(layer.training or "forward" in vars(layer) for layer in model.modules())
    loop.update_batch_norm(model, loader, max_batches=1)
    assert model[1].num_batches_tracked == 1


def test_trainer_refuses_two_averages_and_the_end_of_an_endless_stream() -> None:
    """Before a rank starts."""
    model = make_normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LoopError, match="`ema` and `average`, and evaluations use one average"):
        ddpilot.Trainer(model, nn.functional.mse_loss, optimizer, ema=0.9, average=Averaging())
    trainer = ddpilot.Trainer(model, nn.functional.mse_loss, optimizer, average=Averaging())
    with pytest.raises(LoopError, match=r"an epoch, and a stream. Pass Averaging\(batch_norm_batches=100\)"):
        trainer.fit(Endless(), max_updates=2, global_batch_size=2, nproc_per_node=2)


def train(folder: Path, num_epochs: int) -> tuple[WeightAverage, int]:
    """A run of two updates per epoch; evaluates the average before and within the loop over the batches."""
    loop = Loop(group=FakeGroup(), checkpoint_dir=folder, progress=False)
    model = nn.Linear(1, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = loop.average(model, 0.5)
    loader = loop.loader(DATA, global_batch_size=3)
    loop.resume()
    loop.evaluate(average, loader, {"loss": nn.functional.mse_loss})
    before = int(average.n_averaged.item())
    for _ in loop.epochs(num_epochs):
        for x, y in loop.batches(loader):
            loop.backward(nn.functional.mse_loss(model(x), y))
            loop.step(optimizer)
            loop.evaluate(average, loader, {"loss": nn.functional.mse_loss})
    loop.release_directory()
    return average, before


def test_each_update_counts_once(tmp_path: Path) -> None:
    """Evaluations, a resume and an evaluation after it do not average the same weights again."""
    average, before = train(tmp_path, 2)
    assert (before, average.n_averaged.item()) == (0, 4)
    average, before = train(tmp_path, 3)
    assert (before, average.n_averaged.item()) == (4, 6)
