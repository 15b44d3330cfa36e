# SPDX-License-Identifier: Apache-2.0
"""Optimizers with closures and plateau schedulers: the numbers of plain PyTorch on 1, 2 and 3 ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddpilot import RankError
from ddpilot.data.global_batches import Plan
from ddpilot.group.init_group import seed_all
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from tests.dist.training.bodies import launch
from tests.dist.training.test_losses import BATCH_SIZE, NUM_SAMPLES, make_data
from tests.soak import often


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is usually written: the gradient is taken at the worst point nearby."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update."""
        assert closure is not None
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in held]).norm()
        moves = [0.05 * one.grad / norm for one in held]
        for one, move in zip(held, moves, strict=True):
            one.add_(move)
        self.zero_grad()
        torch.enable_grad()(closure)()
        for one, move in zip(held, moves, strict=True):
            one.sub_(move).sub_(one.grad, alpha=self.param_groups[0]["lr"])


def make_model() -> nn.Module:
    """A small network in float64."""
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    "lbfgs_plain": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3),
    "sam": lambda model: Sam(model.parameters(), lr=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}
NUM_EPOCHS = 2


def plain(kind: str) -> tuple[list[float], torch.Tensor]:
    """Learning rates and weights of plain PyTorch. The loss is a mean over the samples with a positive target."""
    seed_all(0)
    model = make_model()
    optimizer, data, rates = MAKERS[kind](model), make_data(), []
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
    plan = Plan(num_samples=NUM_SAMPLES, global_batch_size=BATCH_SIZE, world_size=1, shuffle=True)
    for epoch in range(NUM_EPOCHS):
        for ids in torch.as_tensor(plan.order(epoch).copy()).split(BATCH_SIZE):  # type: ignore[no-untyped-call]
            x, y, _ = data[ids]
            seen = [0.0]

            def closure(x: torch.Tensor = x, y: torch.Tensor = y, seen: list[float] = seen) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                seen[0] = loss.item()
                return loss

            if kind in ("sam", "sgd"):
                closure()
            optimizer.step() if kind == "sgd" else optimizer.step(closure)  # type: ignore[arg-type]
            scheduler.step(seen[0])
            rates.append(optimizer.param_groups[0]["lr"])
    return rates, torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def with_loop(kind: str, *, counts: bool = False, nan_at: int = -1) -> tuple[list[float], torch.Tensor]:
    """The same with a `Loop`; `counts`: the number of samples by `count=`. `nan_at`: a NaN on rank 1 in that pass."""
    loop = Loop(progress=False)
    inner = make_model()
    optimizer = MAKERS[kind](inner)
    model, optimizer, scheduler = loop.prepare(inner, optimizer, ReduceLROnPlateau(optimizer, patience=0, factor=0.9))
    loader = loop.loader(make_data(), global_batch_size=BATCH_SIZE, shuffle=True)
    rates, num_passes = [], 0
    for _ in loop.epochs(NUM_EPOCHS):
        for x, y, _ in loop.batches(loader):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                nonlocal num_passes
                with loop.accumulate(model):
                    loss = mse_loss(model(x), y)
                    if num_passes == nan_at and loop.rank == 1:
                        loss = loss * math.nan
                    loop.backward(loss, len(x) if counts else None)
                num_passes += 1

            if kind in ("sam", "sgd"):
                closure()
            assert loop.step(optimizer, scheduler, closure=None if kind == "sgd" else closure)
            rates.append(optimizer.param_groups[0]["lr"])
    assert loop.num_updates == len(rates)
    return rates, torch.cat([one.detach().reshape(-1) for one in unwrap(model).parameters()])


def plain_all() -> list[tuple[list[float], torch.Tensor]]:
    """All kinds, the first one twice."""
    return [plain(kind) for kind in (*MAKERS, "lbfgs")]


def with_loop_all() -> list[tuple[list[float], torch.Tensor]]:
    """All kinds, and the first one with counts."""
    return [*(with_loop(kind) for kind in MAKERS), with_loop("lbfgs", counts=True)]


@often("3")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_closures_and_plateaus_train_as_in_one_process(num_ranks: int) -> None:
    """LBFGS with a line search and without, SAM; learning rates that a plateau lowers; ranks without samples."""
    (expected,) = launch(1, plain_all)
    for ranks in launch(num_ranks, with_loop_all):
        for (rates, weights), (plain_rates, plain_weights), kind in zip(ranks, expected, (*MAKERS, "x"), strict=True):
            assert rates == pytest.approx(plain_rates, rel=1e-12), kind
            assert torch.allclose(weights, plain_weights, rtol=1e-9, atol=1e-10), kind
    assert expected[0][0][-1] < expected[0][0][0]


def test_a_nan_in_a_later_pass_of_a_closure_is_raised_on_all_ranks() -> None:
    """With the rank and the batch; no rank computes on with other numbers."""
    with pytest.raises(RankError, match=r"on rank 1 the loss is nan in epoch 0, batch 0"):
        launch(2, with_loop, "lbfgs", nan_at=2)
