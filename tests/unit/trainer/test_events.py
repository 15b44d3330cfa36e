# SPDX-License-Identifier: Apache-2.0
"""Events around batches and before steps, and methods of callbacks that choose their ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpilot
from ddpilot import FakeGroup
from ddpilot.errors import LoopError
from ddpilot.trainer.callback import CallbackRunner, ranks_of
from ddpilot.training.loop import Loop

X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(10, 2)
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Events(ddpilot.Callback):
    """Records the events with the number of updates before each, and the size of the batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.sizes: list[int] = []

    def on_batch_start(self, run: ddpilot.Run) -> None:
        self.seen.append(("batch", run.update))
        self.sizes.append(len(run.batch[0]))

    def on_step_start(self, run: ddpilot.Run) -> None:
        assert all(parameter.grad is not None for parameter in run.model.parameters())
        self.seen.append((run.stepping, run.update))

    def on_batch_end(self, run: ddpilot.Run) -> None:
        assert run.loss is not None
        self.seen.append(("end", run.update))

    def on_update_end(self, run: ddpilot.Run) -> None:
        assert run.stepping == ""
        self.seen.append(("update", run.update))


def train(*callbacks: ddpilot.Callback, epochs: int = 1, **options: Any) -> ddpilot.Trainer:
    """A fit of three batches per epoch in this process."""
    torch.manual_seed(1)
    model = nn.Linear(2, 1).double()
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **options}
    trainer = ddpilot.Trainer(model, nn.functional.mse_loss, callbacks=callbacks, **given)
    trainer.fit(DATA, epochs=epochs, global_batch_size=4, nproc_per_node=0, shuffle=False, progress=False)
    return trainer


def test_events_of_batches_and_steps_come_in_order() -> None:
    """Groups of two batches: one step and one end of an update for each."""
    events = Events()
    trainer = train(events, accumulate=2)
    group = [("batch", 0), ("end", 0), ("batch", 0), ("optimizer", 0), ("end", 1), ("update", 1)]
    assert events.seen == [*group, ("batch", 1), ("optimizer", 1), ("end", 2), ("update", 2)]
    assert events.sizes == [4, 4, 2]
    assert not trainer.optimizers["optimizer"]._optimizer_step_pre_hooks


class Twice(ddpilot.Callback):
    """Doubles the inputs, and halves the gradients."""

    ranks = "all"

    def on_batch_start(self, run: ddpilot.Run) -> None:
        x, y = run.batch
        run.batch = (2 * x, y)

    def on_step_start(self, run: ddpilot.Run) -> None:
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


def test_callbacks_may_change_the_batch_and_the_gradients() -> None:
    """The numbers are those of plain PyTorch with both changes."""
    trainer = train(Twice())
    torch.manual_seed(1)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(X.split(4), DATA.tensors[1].split(4), strict=True):  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        (0.5 * nn.functional.mse_loss(model(2 * x), y)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.testing.assert_close(trainer.model.state_dict(), model.state_dict(), rtol=1e-12, atol=1e-14)


class Mixed(ddpilot.Callback):
    """Writes on rank 0, and reduces on all ranks."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.num_written = 0

    @ddpilot.Callback.called_on("all")
    def on_update_end(self, run: ddpilot.Run) -> None:
        self.sums.append(run.loop.reduce(1.0, "sum").item())

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        self.num_written += 1
        with pytest.raises(LoopError, match="`ranks` is 'zero': only rank 0 calls it"):
            run.loop.reduce(1.0, "sum")


def test_methods_choose_their_ranks() -> None:
    """The others are called on the ranks of the class."""
    mixed = Mixed()
    train(mixed)
    assert (mixed.sums, mixed.num_written) == ([1.0, 1.0, 1.0], 1)
    assert [ranks_of(mixed, name) for name in ("on_update_end", "on_epoch_end")] == ["all", "zero"]
    with pytest.raises(LoopError, match="ranks 'some'. Use 'zero' or 'all'"):
        ddpilot.Callback.called_on("some")  # type: ignore[arg-type]


def test_other_ranks_call_only_methods_of_all_ranks() -> None:
    """On a rank other than 0."""
    loop = Loop(group=FakeGroup(1, 2), progress=False)
    run = ddpilot.Run(loop=loop, model=nn.Linear(1, 1), wrapped=None, optimizers={})
    calls = CallbackRunner([Mixed(), Events()], run)._calls
    assert {name for name, each in calls.items() if each} == {"on_update_end"}


class FailsInBatch(ddpilot.Callback):
    """Raises before the second batch."""

    def on_batch_start(self, run: ddpilot.Run) -> None:
        if run.update == 1:
            raise RuntimeError("no more mixing")


def test_an_error_before_a_batch_ends_the_fit() -> None:
    """With this error."""
    with pytest.raises(RuntimeError, match="no more mixing"):
        train(FailsInBatch(), epochs=3)
