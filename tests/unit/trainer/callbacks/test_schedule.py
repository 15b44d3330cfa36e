# SPDX-License-Identifier: Apache-2.0
"""Values that follow the number of the update or the epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.schedule import Schedule
from tests.unit.trainer.callbacks.fits import DATA, Each, fit, make_trainer


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """The first weight apart from the rest."""
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)


def test_schedule_is_in_force_from_the_first_update_on() -> None:
    """Update n is made with value(n - 1): the weights are those of a plain loop that sets it before each step."""
    trainer = make_trainer(Schedule("weight_decay", lambda number: 0.1 * number))
    plain = make_trainer().model
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    fit(trainer, 2)
    x, y = DATA.tensors
    for update in range(6):
        optimizer.param_groups[0]["weight_decay"] = 0.1 * update
        batch = slice(update % 3 * 4, update % 3 * 4 + 4)
        loss = nn.functional.mse_loss(plain(x[batch]), y[batch])
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    for ours, theirs in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5)


def test_schedule_continues_from_any_position() -> None:
    """The value follows from the number alone, of epochs too; only the group that is meant has it."""
    seen: list[Any] = []

    def look(run: Any) -> None:
        seen.append([group["momentum"] for group in run.optimizer.param_groups])

    schedules = [Schedule("momentum", lambda epoch: epoch / 10, by="epoch", group=1), Each("on_update_end", look)]
    trainer = make_trainer(*schedules, optimizer=two_groups)
    trainer.position = replace(trainer.position, epoch=4, num_updates=12)
    fit(trainer, 2)
    assert seen == [[0, 0.4]] * 3 + [[0, 0.5]] * 3


class Warm(nn.Module):
    """A model with numbers to schedule: a plain one and a buffer, one layer down."""

    temperature: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (samples, 1)."""
        return torch.as_tensor(self.linear(self.dropout(x)) * self.temperature)


def test_schedule_sets_attributes_of_the_model() -> None:
    """A number is set, a tensor is filled and stays the same object."""
    trainer = make_trainer(
        Schedule("model.dropout.p", lambda epoch: 0.1 * epoch, by="epoch"),
        Schedule("model.temperature", lambda update: 1.0 / (1 + update)),
    )
    trainer.model = model = Warm()
    trainer.optimizers = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    buffer = model.temperature
    fit(trainer, 2)
    assert model.dropout.p == pytest.approx(0.1)
    assert model.temperature is buffer
    assert buffer.item() == pytest.approx(1 / 7)


@pytest.mark.parametrize(
    ("target", "options", "found"),
    [
        ("momentun", {}, "no parameter group has it. The keys are lr, .*momentum"),
        ("momentum", {"group": 3}, "no parameter group has it"),
        ("momentum", {"optimizer": "generator"}, "no optimizer 'generator'. The optimizers are optimizer"),
        ("model.head.p", {}, "'Sequential' object has no attribute 'head'. Give the attribute its first value"),
        ("lr", {}, "a scheduler also sets it"),
    ],
)
def test_schedule_rejects_unknown_targets(target: str, options: Any, found: str) -> None:
    """Before the first batch: a misspelt name would train on without a word."""
    scheduler = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    with pytest.raises(LoopError, match=f"scheduling '{target}': {found}"):
        fit(make_trainer(Schedule(target, float, **options), **scheduler))
    with pytest.raises(LoopError, match="`by` is 'batch'"):
        Schedule(target, float, by="batch")  # type: ignore[arg-type]
