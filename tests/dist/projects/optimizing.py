# SPDX-License-Identifier: Apache-2.0
"""Projects by their optimizers: closures (SAM, LBFGS), unfreezing with a new optimizer, two optimizers of one model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import ddpilot
from tests.dist.projects.supervised import (
    GLOBAL_BATCH_SIZE,
    NUM_SAMPLES,
    Numbers,
    Project,
    draw,
    make_loop,
    order_of,
    sgd,
    state_of,
    update,
)

X = draw(NUM_SAMPLES, 6)
Y = X[:, :1] * X[:, 1:2]


def make_model() -> nn.Sequential:
    """A number for each row, the same in every process."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class SAM(Optimizer):
    """Sharpness-aware minimization: the step follows the gradient at the worst place near the weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "radius": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Runs `closure`, which clears the gradients and computes them, twice."""
        weights = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            loss = closure()
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        moves = [0.1 * p.grad / norm for p in weights]
        torch._foreach_add_(weights, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(weights, moves)
        torch._foreach_add_(weights, [p.grad for p in weights], alpha=-0.05)
        return loss


class Closures:
    """An optimizer that asks for the gradient several times in a step."""

    def __init__(self, make_optimizer: Callable[[Any], Optimizer], num_epochs: int) -> None:
        self.make_optimizer, self.num_epochs = make_optimizer, num_epochs

    def by_hand(self) -> Numbers:
        """The closure as torch's documentation writes it."""
        model = make_model()
        optimizer, losses = self.make_optimizer(model.parameters()), []
        for epoch in range(self.num_epochs):
            for numbers in order_of(epoch):
                x, y = X[numbers], Y[numbers]

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = functional.mse_loss(model(x), y)
                    loss.backward()  # type: ignore[no-untyped-call]
                    return loss

                losses.append(torch.as_tensor(optimizer.step(closure)).detach())  # type: ignore[arg-type]
        return {"losses": losses, "state": state_of(model)}

    def with_loop(self) -> Numbers:
        """The same with `loop.backward`, handed to `loop.step`."""
        loop = make_loop()
        plain = make_model()
        model, optimizer = loop.prepare(plain, self.make_optimizer(plain.parameters()))
        loader = loop.loader(TensorDataset(X, Y), global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
        losses: list[torch.Tensor] = []
        for _ in loop.epochs(self.num_epochs):
            for x, y in loop.batches(loader):
                seen: list[torch.Tensor] = []

                def closure(x: torch.Tensor = x, y: torch.Tensor = y, seen: list[torch.Tensor] = seen) -> torch.Tensor:
                    optimizer.zero_grad()
                    with loop.accumulate(model):
                        loss = functional.mse_loss(model(x), y)
                        loop.backward(loss)
                    seen.append(loop.reduce(loss))
                    return loss

                loop.step(optimizer, closure=closure)
                losses.append(seen[0])
        return {"losses": losses, "state": state_of(model)}


class Unfreezing:
    """The first layer joins after two epochs, with an optimizer of its own rates."""

    @staticmethod
    def optimizer_of(model: nn.Sequential) -> Optimizer:
        """Discriminative learning rates for all layers."""
        groups = [{"params": model[0].parameters(), "lr": 0.005}, {"params": model[2].parameters()}]
        return sgd(groups)

    def by_hand(self) -> Numbers:
        """Two phases."""
        model = make_model()
        model[0].requires_grad_(False)
        optimizer, losses = sgd(model[2].parameters()), []
        for epoch in range(4):
            if epoch == 2:
                model[0].requires_grad_(True)
                optimizer = self.optimizer_of(model)
            for numbers in order_of(epoch):
                loss = functional.mse_loss(model(X[numbers]), Y[numbers])
                update(loss, optimizer)
                losses.append(loss.detach())
        return {"losses": losses, "state": state_of(model), "updates": [torch.tensor(float(len(losses)))]}

    def with_loop(self) -> Numbers:
        """`prepare` again wraps the model again, since DDP looks at what is trained when it is made."""
        loop = make_loop()
        plain = make_model()
        plain[0].requires_grad_(False)
        model, optimizer = loop.prepare(plain, sgd(plain[2].parameters()))
        loader = loop.loader(TensorDataset(X, Y), global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
        losses = []
        for epoch in loop.epochs(4):
            if epoch == 2:
                plain[0].requires_grad_(True)
                model, optimizer = loop.prepare(ddpilot.unwrap(model), self.optimizer_of(plain))
            for x, y in loop.batches(loader):
                with loop.accumulate(model):
                    loss = functional.mse_loss(model(x), y)
                    loop.backward(loss)
                losses.append(loop.reduce(loss))
                loop.step(optimizer)
        return {"losses": losses, "state": state_of(model), "updates": [torch.tensor(float(loop.num_updates))]}


class TwoOptimizers:
    """The weights of one model in two optimizers, a schedule that looks at the validation's loss."""

    @staticmethod
    def optimizers_of(model: nn.Sequential) -> tuple[Optimizer, Optimizer]:
        """AdamW for the first layer, SGD for the last one."""
        return torch.optim.AdamW(model[0].parameters(), lr=0.01), sgd(model[2].parameters())

    def by_hand(self) -> Numbers:
        """Both step after each batch."""
        model = make_model()
        first, second = self.optimizers_of(model)
        scheduler, losses = ReduceLROnPlateau(second, patience=0, threshold=0.3), []
        for epoch in range(4):
            for numbers in order_of(epoch):
                loss = functional.mse_loss(model(X[numbers]), Y[numbers])
                update(loss, first, second)
                losses.append(loss.detach())
            with torch.no_grad():
                validation = functional.mse_loss(model(X), Y)
            scheduler.step(validation.item())
            losses.append(validation)
        return {"losses": losses, "state": state_of(model), "lr": [torch.tensor(second.param_groups[0]["lr"])]}

    def with_loop(self) -> Numbers:
        """The value of `evaluate` is that of all samples, so that every rank's schedule does the same."""
        loop = make_loop()
        plain = make_model()
        first, second = self.optimizers_of(plain)
        model, first, second = loop.prepare(plain, first, second)
        scheduler = loop.prepare(ReduceLROnPlateau(second, patience=0, threshold=0.3))
        data = TensorDataset(X, Y)
        loader = loop.loader(data, global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
        everything = loop.loader(data, global_batch_size=GLOBAL_BATCH_SIZE)
        losses = []
        for _ in loop.epochs(4):
            for x, y in loop.batches(loader):
                with loop.accumulate(model):
                    loss = functional.mse_loss(model(x), y)
                    loop.backward(loss)
                losses.append(loop.reduce(loss))
                loop.step(first)
                loop.step(second)
            value = loop.evaluate(model, everything, {"error": lambda output, y: (output - y).square()})["error"]
            scheduler.step(value)
            losses.append(torch.tensor(value))
        return {"losses": losses, "state": state_of(model), "lr": [torch.tensor(second.param_groups[0]["lr"])]}


PROJECTS: dict[str, Project] = {
    "SAM": Closures(SAM, num_epochs=3),
    "LBFGS": Closures(lambda parameters: LBFGS(parameters, max_iter=3, history_size=5), num_epochs=2),
    "unfreezing": Unfreezing(),
    "two optimizers and a schedule by the validation": TwoOptimizers(),
}
