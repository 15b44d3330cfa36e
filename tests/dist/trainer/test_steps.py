# SPDX-License-Identifier: Apache-2.0
"""What an update may be besides one backward pass and one step: the numbers of plain PyTorch on 1, 2 and 3 ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import TensorDataset

import ddpilot
from ddpilot.data.global_batches import Plan
from tests.dist.trainer.bodies import launcher
from tests.preload import PRELOAD
from tests.soak import often

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 13, 4, 2
"""The last batch of an epoch has one sample: with 2 and 3 ranks some have none."""
same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def make_model() -> nn.Sequential:
    """The same weights every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_data() -> TensorDataset:
    """Points and a target."""
    x = torch.linspace(-1, 1, 4 * NUM_SAMPLES, dtype=torch.float64).reshape(4, NUM_SAMPLES).t().contiguous()
    return TensorDataset(x, (x[:, :2] * x[:, 2:]).sum(1, keepdim=True))


def batches(num_epochs: int = NUM_EPOCHS, size: int = BATCH_SIZE) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of all epochs, as one process reads them."""
    plan = Plan(num_samples=NUM_SAMPLES, global_batch_size=size, world_size=1, shuffle=True)
    for epoch in range(num_epochs):
        for ids in torch.as_tensor(plan.order(epoch).copy()).split(size):  # type: ignore[no-untyped-call]
            x, y = make_data()[ids]
            yield x, y


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation by a second optimizer; reads the gradients before it calls its closure."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.5)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update."""
        assert closure is not None, "SAM requires a closure"
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in held]).norm()
        moves = [0.05 * one.grad / (norm + 1e-12) for one in held]
        for one, move in zip(held, moves, strict=True):
            one.add_(move)
        self.zero_grad()
        torch.enable_grad()(closure)()
        for one, move in zip(held, moves, strict=True):
            one.sub_(move)
        self.base.step()


def count_large(output: torch.Tensor, y: torch.Tensor) -> Any:
    """A mean over the larger targets, and how many these are."""
    above = y > -0.35
    return ((output - y)[above].square().sum() / max(int(above.sum()), 1), int(above.sum()))


Make = Callable[[nn.Module], torch.optim.Optimizer]
CLOSURES: dict[str, tuple[Make, dict[str, Any], Any]] = {
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3), {}, mse_loss),
    "a line search": (
        lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, line_search_fn="strong_wolfe"),
        {},
        mse_loss,
    ),
    "SAM": (lambda model: Sam(model.parameters(), 0.1), {"closure": True}, mse_loss),
    "SAM with counts": (lambda model: Sam(model.parameters(), 0.1), {"closure": True, "clip_norm": 0.05}, count_large),
}


def closures_plainly(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss before each update, and the weights afterwards."""
    make, options, loss_fn = CLOSURES[name]
    model, losses = make_model(), []
    optimizer = make(model)
    for x, y in batches():
        seen: list[float] = []

        def closure(x: torch.Tensor = x, y: torch.Tensor = y, seen: list[float] = seen) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss = loss[0] if isinstance(loss, tuple) else loss
            loss.backward()
            if "clip_norm" in options:
                nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
            seen.append(loss.item())
            return loss  # type: ignore[no-any-return]

        if isinstance(optimizer, Sam):
            closure()
        optimizer.step(closure)  # type: ignore[arg-type]
        losses.append(seen[0])
    return losses, model.state_dict()


def fit(
    model: nn.Module, optimizer: Any, loss_fn: Any = mse_loss, *, ddp: Any = None, **options: Any
) -> ddpilot.Trainer:
    """A trainer after a fit on the ranks that are there."""
    trainer = ddpilot.Trainer(model, loss_fn, optimizer, **options)
    trainer.fit(make_data(), epochs=NUM_EPOCHS, global_batch_size=BATCH_SIZE, progress=False, ddp=ddp)
    return trainer


def in_groups(model: Any, **options: Any) -> torch.optim.Optimizer:
    """Two parameter groups, the second with limits of its own."""
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), **options}]
    return torch.optim.SGD(groups, lr=0.3, momentum=0.5)


CLIPPINGS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, float]]] = {
    "value": ({"clip_value": 0.02}, {}, ("value", 0.02)),
    "1-norm": ({"clip_norm": 0.1, "clip_norm_type": 1}, {}, ("model", 1)),
    "largest": ({"clip_norm": 0.1, "clip_norm_type": math.inf}, {}, ("model", math.inf)),
    "groups": (
        {"clip_norm": 0.1, "clip_per": "group", "accumulate": 2},
        {"clip_norm": 0.01},
        ("group", 2),
    ),
}
"""Options of a trainer and of the second parameter group; what is clipped and the norm type."""


def clipping_plainly(name: str) -> dict[str, torch.Tensor]:
    """The weights."""
    options, of_group, (what, norm_type) = CLIPPINGS[name]
    model = make_model()
    optimizer = in_groups(model, **of_group)
    for x, y in batches(size=BATCH_SIZE * options.get("accumulate", 1)):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        if what == "value":
            nn.utils.clip_grad_value_(model.parameters(), options["clip_value"])
        elif what == "model":
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"], norm_type)
        else:
            nn.utils.clip_grad_norm_(model[0].parameters(), options["clip_norm"], norm_type)
            nn.utils.clip_grad_norm_(model[2].parameters(), of_group["clip_norm"], norm_type)
        optimizer.step()
    return model.state_dict()


def clipping_on_ranks() -> list[dict[str, torch.Tensor]]:
    """Each kind of clipping, on this rank; the last one also with a sharded optimizer."""
    found = []
    for options, of_group, _ in CLIPPINGS.values():
        fit(model := make_model(), in_groups(model, **of_group), **options)
        found.append(model.state_dict())
    options, of_group, _ = CLIPPINGS["groups"]
    fit(model := make_model(), in_groups(model, **of_group), ddp={"shard": "optimizer"}, **options)
    return [*found, model.state_dict()]


def make_normed() -> nn.Sequential:
    """With a BatchNorm that trains with fixed statistics, since those of a batch depend on the ranks."""
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double().eval()


def average_plainly() -> dict[str, Any]:
    """Weights of SWA from the end of the first epoch on, and the validation loss."""
    model = make_normed()
    optimizer, average = torch.optim.SGD(model.parameters(), lr=0.1), AveragedModel(model)
    num_batches = -(-NUM_SAMPLES // BATCH_SIZE)
    for number, (x, y) in enumerate(batches(), 1):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number % num_batches == 0:
            average.update_parameters(model)
    last = list(batches())[-num_batches:-1]  # without the one of a single sample
    update_bn(last, average)
    x, y = make_data().tensors
    with torch.no_grad():
        return {**average.module.state_dict(), "loss": mse_loss(average.module.eval()(x), y)}


def average_on_ranks() -> dict[str, Any]:
    """The same by a trainer."""
    model = make_normed()
    options = ddpilot.Averaging(start="1 epoch", every="1 epoch", batch_norm_batches=NUM_SAMPLES // BATCH_SIZE)
    trainer = ddpilot.Trainer(model, mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), average=options)
    data = make_data()
    history = trainer.fit(data, data, epochs=NUM_EPOCHS, global_batch_size=BATCH_SIZE, progress=False)
    assert trainer.ema is not None
    return {
        **trainer.ema.module.state_dict(),
        "loss": torch.tensor(history.epochs[-1]["val_loss"], dtype=torch.float64),
    }


def schedule_plainly() -> dict[str, torch.Tensor]:
    """The weights with updates of 4, 4, 4, 1, then of 8 and 5 samples."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    plan = Plan(num_samples=NUM_SAMPLES, global_batch_size=BATCH_SIZE, world_size=1, shuffle=True)
    for epoch, sizes in enumerate(([4, 4, 4, 1], [8, 5])):
        for ids in torch.as_tensor(plan.order(epoch).copy()).split(sizes):  # type: ignore[no-untyped-call]
            x, y = make_data()[ids]
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.state_dict()


def schedule_on_ranks() -> dict[str, torch.Tensor]:
    """The same in two fits, of which the first ends within the second epoch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    trainer = ddpilot.Trainer(model, mse_loss, optimizer, accumulate={0: 1, "4 updates": 2})
    goals: list[dict[str, Any]] = [{"max_updates": 5}, {"until_epoch": NUM_EPOCHS}]
    for goal in goals:
        trainer.fit(make_data(), global_batch_size=BATCH_SIZE, progress=False, **goal)
    assert trainer.position.num_updates == 6
    return model.state_dict()


def all_on_ranks() -> tuple[Any, ...]:
    """All kinds of updates; the average by hand, too."""
    return closures_on_ranks(), clipping_on_ranks(), average_on_ranks(), average_plainly(), schedule_on_ranks()


def closures_on_ranks() -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Each kind of closure, on this rank."""
    found = []
    for make, options, loss_fn in CLOSURES.values():
        trainer = fit(model := make_model(), make(model), loss_fn, **options)
        found.append(([row["loss"] for row in trainer.history.updates], model.state_dict()))
    return found


@pytest.mark.timeout(100)
@often("3")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_steps_have_the_numbers_of_plain_pytorch(num_ranks: int) -> None:
    """Optimizers with closures; clipping, also with accumulation; SWA with BatchNorm; ranks without samples."""
    ranks = replace(launcher(), nproc_per_node=num_ranks, preload=PRELOAD).run(all_on_ranks)
    for found, clipped, averaged, averaged_plainly, scheduled in ranks:
        for (losses, weights), name in zip(found, CLOSURES, strict=True):
            expected, plain_weights = closures_plainly(name)
            # An update whose mean is over nothing is not in the history.
            assert losses == pytest.approx([loss for loss in expected if loss], rel=1e-10), name
            same(weights, plain_weights, msg=f"{name}: {{}}".format)
        same(averaged.pop("loss"), averaged_plainly.pop("loss"))
        same(averaged, averaged_plainly)
        same(scheduled, schedule_plainly())
        for weights, name in zip(clipped, (*CLIPPINGS, "groups"), strict=True):
            same(weights, clipping_plainly(name), msg=f"{name}: {{}}".format)


@pytest.mark.timeout(100)
def test_an_optimizer_with_a_closure_comes_back_and_goes_on() -> None:
    """LBFGS keeps what a copy of it would lack; two fits of one epoch are one of two."""
    model = make_model()
    trainer = ddpilot.Trainer(model, mse_loss, CLOSURES["LBFGS"][0](model), launcher=launcher())
    for _ in range(NUM_EPOCHS):
        trainer.fit(make_data(), epochs=1, global_batch_size=BATCH_SIZE, progress=False, nproc_per_node=2)
    same(model.state_dict(), closures_plainly("LBFGS")[1])
