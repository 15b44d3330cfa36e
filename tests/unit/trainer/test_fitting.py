# SPDX-License-Identifier: Apache-2.0
"""A fit in this process: how it ends early, and what is there then."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import ddpilot

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2)
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Stream(IterableDataset[Any]):
    """The same samples, of which nobody knows how many come."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


class Faulty(nn.Linear):
    """Fails in one of its forward passes."""

    calls_left = 100

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ArithmeticError("a bad sample")
        return super().forward(x)


class StopAt(ddpilot.Callback):
    """Stops with the update after this one."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_update_end(self, run: ddpilot.Run) -> None:
        if run.update == self.last:
            run.stop()


class Lonely(ddpilot.Callback):
    """Of rank 0, and calls for all ranks."""

    def __init__(self, of_group: bool) -> None:
        self.of_group = of_group

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        assert run.loop.world_size == run.loop.group.world_size == 1
        if self.of_group:
            run.loop.group.barrier()
        else:
            run.loop.reduce(1.0)


def make_trainer(**options: Any) -> ddpilot.Trainer:
    """With state in the optimizer and in a scheduler."""
    return ddpilot.Trainer(
        Faulty(2, 1).double(),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ema=0.9,
        **options,
    )


def fit(trainer: ddpilot.Trainer, data: Any = DATA, **options: Any) -> ddpilot.History:
    """Three updates in an epoch."""
    return trainer.fit(data, DATA, global_batch_size=4, nproc_per_node=0, progress=False, **options)


def state_of(trainer: ddpilot.Trainer) -> Any:
    """All that a fit changes."""
    things = [trainer.model, trainer.ema, *trainer.optimizers.values(), *trainer.schedulers.values()]
    return copy.deepcopy([thing.state_dict() for thing in things])


def test_fit_in_this_process_leaves_all_as_it_was_when_it_fails() -> None:
    """As ranks do, which train copies; the next fit goes on from there."""
    trainer, other = make_trainer(), make_trainer()
    other.model.load_state_dict(trainer.model.state_dict())
    for each in (trainer, other):
        fit(each)
    before, position, history = state_of(trainer), trainer.position, copy.deepcopy(trainer.history)
    assert isinstance(trainer.model, Faulty)
    trainer.model.calls_left = 5
    with pytest.raises(ArithmeticError, match="a bad sample"):
        fit(trainer, epochs=2)
    torch.testing.assert_close(state_of(trainer), before, rtol=0, atol=0)
    assert (trainer.position, trainer.history) == (position, history)
    assert trainer.model.weight.grad is None
    trainer.model.calls_left = 100
    for each in (trainer, other):
        fit(each)
    torch.testing.assert_close(trainer.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("data", [DATA, Stream()], ids=["dataset", "stream"])
def test_a_stop_after_the_last_batch_leaves_no_part_without_samples(data: Any) -> None:
    """Of a dataset the epoch is complete; a stream's end is found by the next fit, which completes the row."""
    trainer = make_trainer(callbacks=[StopAt(2)])
    fit(trainer, data, epochs=4)
    row = trainer.history.epochs[-1]
    assert (row["update"], row["samples"], "val_loss" in row) == (3, 12, data is DATA)
    trainer.callbacks.clear()
    fit(trainer, data, epochs=1)
    rows = [
        (row["epoch"], row["update"], row["samples"], row["loss"] > 0, row["val_loss"] > 0)
        for row in trainer.history.epochs
    ]
    assert rows == [(0, 3, 12, True, True), (1, 6, 12, True, True)][: 2 if data is DATA else 1]


@pytest.mark.parametrize(("of_group", "name"), [(False, "run.loop.reduce"), (True, "run.loop.group.barrier")])
def test_a_callback_of_rank_zero_cannot_call_for_all_ranks(of_group: bool, name: str) -> None:
    """With several ranks it would wait for ever: it is refused with one, too."""
    with pytest.raises(ddpilot.LoopError, match=f"calling {name} in Lonely: `ranks` is 'zero'"):
        fit(make_trainer(callbacks=[Lonely(of_group)]))
