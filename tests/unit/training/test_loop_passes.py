# SPDX-License-Identifier: Apache-2.0
"""Passes, optimizers and evaluations of one loop that could disturb each other, on one rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup
from ddpilot.errors import LoopError, NonFiniteError
from ddpilot.training.checks.nonfinite import FiniteWatch
from ddpilot.training.loop import Loop

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


def make(**options: Any) -> tuple[Loop, nn.Module, torch.optim.Optimizer]:
    """A loop alone, with a model."""
    loop = Loop(group=FakeGroup(), progress=False, **options)
    model = nn.Linear(1, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return loop, model, optimizer


def make_loader(loop: Loop, offset: float = 0.0) -> Any:
    """Eight samples in batches of four."""
    return loop.loader(TensorDataset(torch.arange(8.0).reshape(-1, 1) + offset), global_batch_size=4)


def train(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """A pass."""
    for (x,) in loop.batches(loader):
        loop.backward(model(x).square().mean())
        loop.step(optimizer)


def test_two_passes_open_at_once_are_refused() -> None:
    """`zip` of two; one inside a batch of another that has ended, or one that was left open before, is fine."""
    loop, _, _ = make()
    first, second = make_loader(loop), make_loader(loop, 10.0)
    opened: Any = loop.batches(first)
    next(opened)
    with pytest.raises(LoopError, match=r"a second loop.batches\(\).*StackDataset\(a, b\)"):
        list(zip(loop.batches(first), loop.batches(second), strict=True))
    seen = [[len(list(loop.batches(second))) for _ in loop.batches(first)] for _ in loop.epochs(1)]
    assert seen == [[2, 2]]
    opened.close()
    assert loop.batch is None


def test_passes_over_two_datasets_of_one_shape_are_one_epoch() -> None:
    """In a loop over range(); a dataset made for each epoch counts as the same."""
    loop, _, _ = make()
    first, second = make_loader(loop), make_loader(loop, 10.0)
    seen = []
    for _ in range(3):
        for loader in (first, second):
            list(loop.batches(loader))
            seen.append(loop.epoch)
    assert seen == [0, 0, 1, 1, 2, 2]
    loop, _, _ = make()
    seen = []
    for _ in range(3):
        list(loop.batches(make_loader(loop)))
        seen.append(loop.epoch)
    assert seen == [0, 1, 2]


def test_passes_over_two_datasets_made_in_each_epoch_are_one_epoch() -> None:
    """The line of the program tells them apart, also that of a call of a function."""
    loop, model, optimizer = make()
    seen = []
    for _ in range(3):
        train(loop, model, optimizer, make_loader(loop))
        seen.append(loop.epoch)
        train(loop, model, optimizer, make_loader(loop, 10.0))
        seen.append(loop.epoch)
        list(loop.batches(make_loader(loop, 20.0)))
        seen.append(loop.epoch)
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_an_optimizer_with_all_parameters_of_an_earlier_one_takes_its_place() -> None:
    """In the count of updates and in checkpoints, with its schedulers; one that was replaced steps no more."""
    loop, model, old = make()
    loop.prepare(torch.optim.lr_scheduler.ExponentialLR(old, 0.9))
    loader = make_loader(loop)
    train(loop, model, old, loader)
    new = loop.prepare(torch.optim.Adam(model.parameters()))
    train(loop, model, new, loader)
    assert loop.num_updates == 4
    assert list(loop._things._things) == ["model", "optimizer"]
    assert loop._things.name_of(new) == "optimizer"
    assert [part.title for part in loop.explain().parts][1:] == ["Adam: as it is"]
    with pytest.raises(LoopError, match="this SGD was replaced.*in one call"):
        loop.step(old)
    both = [torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.2)]
    loop.prepare(*both)
    assert list(loop._things._things) == ["model", "optimizer", "optimizer2"]
    train(loop, model, both[0], loader)
    assert loop.num_updates == 6


def test_an_optimizer_whose_gradients_one_of_the_same_parameters_has_cleared_is_refused() -> None:
    """In one call of `prepare` or two, of all parameters or a part; used in turn, both are fine."""
    loop, model, first = make()
    second = loop.prepare(torch.optim.Adam(list(model.parameters())[:1]))
    for (x,) in loop.batches(make_loader(loop)):
        for optimizer, other in ((first, second), (second, first)):
            loop.backward(model(x).mean())
            loop.step(optimizer)
            with pytest.raises(
                LoopError, match=r"parameters of a different optimizer.*would not change them.*Give each"
            ):
                loop.step(other)
            second.zero_grad()
            first.zero_grad()


def test_updates_are_counted_whichever_optimizers_step() -> None:
    """An optimizer of a part of the parameters that replaces one of all; two per batch; one twice per batch."""
    loop, model, old = make()
    loader = make_loader(loop)
    train(loop, model, old, loader)
    weight, bias = model.parameters()
    part = loop.prepare(torch.optim.Adam([bias]))
    weight.requires_grad_(False)
    train(loop, model, part, loader)
    weight.requires_grad_(True)
    assert loop.num_updates == 4
    other = loop.prepare(torch.optim.SGD([weight], lr=0.1))
    for (x,) in loop.batches(loader):
        loop.backward(model(x).mean())
        for optimizer in (other, part, other, part):
            loop.step(optimizer)
    assert loop.num_updates == 8
    loop.backward(model(torch.ones(1, 1)).mean(), count=1)
    loop.step(part)
    loop.step(other)
    assert loop.num_updates == 9


class Pair(nn.Module):
    """Takes one or two inputs, and draws in `eval()` too."""

    def forward(self, a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        """a, b: (samples, 1)."""
        torch.randn(3)
        return a if b is None else a + 100 * b


def test_evaluate_and_predict_call_the_model_with_all_but_the_target() -> None:
    """As a Trainer does: of three items two are inputs, a mapping is keyword arguments."""
    loop, _, _ = make()
    x = torch.arange(4.0).reshape(-1, 1)
    three, one = (loop.loader(TensorDataset(*[x] * num), global_batch_size=2) for num in (3, 1))
    assert loop.predict(Pair(), three).flatten().tolist() == [0, 101, 202, 303]
    assert loop.predict(Pair(), one).flatten().tolist() == [0, 1, 2, 3]
    error = {"error": lambda output, target: output - target}
    assert loop.evaluate(Pair(), three, error) == {"error": 150.0}
    named: Any = [{"a": value, "b": value} for value in x]
    mappings = loop.loader(named, global_batch_size=2)
    assert loop.predict(Pair(), mappings).flatten().tolist() == [0, 101, 202, 303]
    mean = {"mean": lambda output, batch: output - batch["a"]}
    assert loop.evaluate(Pair(), mappings, mean) == {"mean": 150.0}


def test_evaluate_and_predict_leave_the_random_state_as_it_was() -> None:
    """A model that draws in `eval()` does not change the training that follows."""
    loop, _, _ = make()
    loader = make_loader(loop)
    before = torch.get_rng_state()
    loop.predict(Pair(), loader)
    loop.evaluate(Pair(), loader, {"mean": lambda x: x}, forward=lambda model, batch: (model(batch[0]),))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_dir_without_epochs_is_said_once_unless_the_user_saves(tmp_path: Path) -> None:
    """In the second epoch, or at the first update where there is a checkpoint that nobody resumed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for how in ("save", "resume", "epochs", "one epoch"):
            parts = make(checkpoint_dir=tmp_path / how)
            loader = make_loader(parts[0])
            if how == "resume":
                parts[0].resume()
            for _ in parts[0].epochs(2) if how == "epochs" else range(1 if how == "one epoch" else 3):
                train(*parts, loader)
                if how == "save":
                    parts[0].save()
    assert [str(one.message) for one in caught] == []
    for folder, num_before in (("nothing", 1), ("save", 0)):
        parts = make(checkpoint_dir=tmp_path / folder)
        loader = make_loader(parts[0])
        for _ in range(num_before):
            train(*parts, loader)
        with pytest.warns(UserWarning, match=r"trains outside of loop.epochs\(\)") as said:
            train(*parts, loader)
        train(*parts, loader)
        assert len(said) == 1


class Behind:
    """Stands for a device that the host runs ahead of: a number arrives only when the host waits for it."""

    is_there = False

    def __init__(self, number: torch.Tensor | None = None) -> None:
        self.number = number

    def send(self, number: torch.Tensor) -> Behind:
        """As `Sender.send`."""
        return Behind(number)

    def read(self) -> float:
        """As `Arriving.read`."""
        assert self.number is not None
        return self.number.item()


def break_after_nan(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A pass that ends by `break` after an update with a loss that is NaN."""
    for (x,) in loop.batches(make_loader(loop)):
        loop.backward(model(x).mean() * math.nan)
        loop.step(optimizer)
        break


@pytest.mark.parametrize(
    "call",
    [
        lambda loop, _: loop.reduce(1.0),
        lambda loop, _: loop.gather([1.0]),
        lambda loop, model: loop.evaluate(model, make_loader(loop), {"a": lambda out: out[:, 0]}, forward=outputs),
        lambda loop, model: loop.predict(model, make_loader(loop)),
        lambda loop, _: list(loop.batches(make_loader(loop))),
        lambda loop, _: list(loop.epochs(1)),
    ],
    ids=["reduce", "gather", "evaluate", "predict", "batches", "epochs"],
)
def test_nan_before_a_break_is_raised_by_the_next_collective_call(call: Callable[[Loop, nn.Module], Any]) -> None:
    """Once, on an accelerator, whose checks have not arrived at the `break`; the weights remain finite."""
    loop, model, optimizer = make()
    loop._updates._watch = FiniteWatch(torch.device("cuda"), Behind())  # type: ignore[arg-type]
    break_after_nan(loop, model, optimizer)
    with pytest.raises(NonFiniteError, match="the loss is nan in epoch 0, batch 0"):
        call(loop, model)
    call(loop, model)
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_nan_before_a_break_in_the_last_epoch_is_raised_at_the_end_of_epochs() -> None:
    """On an accelerator."""
    loop, model, optimizer = make()
    loop._updates._watch = FiniteWatch(torch.device("cuda"), Behind())  # type: ignore[arg-type]
    epochs = loop.epochs(1)
    next(epochs)
    break_after_nan(loop, model, optimizer)
    with pytest.raises(NonFiniteError, match="the loss is nan in epoch 0, batch 0"):
        next(epochs)


def outputs(model: nn.Module, batch: Any) -> tuple[torch.Tensor]:
    """The arguments of a metric without targets."""
    return (model(batch[0]),)
