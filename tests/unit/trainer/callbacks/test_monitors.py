# SPDX-License-Identifier: Apache-2.0
"""Learning rates and norms, compared with a plain loop."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpilot.trainer.callbacks.logs import JsonLinesLog
from ddpilot.trainer.callbacks.monitors import LRMonitor, Norms
from tests.unit.trainer.callbacks.fits import DATA, Each, fit, make_trainer


def test_lr_monitor_has_the_rate_that_an_update_was_made_with() -> None:
    """Not the rate that the scheduler set afterwards; by group index, with further values of the groups."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        groups = [{"params": [first], "momentum": 0.5}, {"params": rest, "lr": 0.25}]
        return torch.optim.SGD(groups, lr=0.125)

    monitor = LRMonitor(every=2, also=("momentum",))
    halve = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
    trainer = fit(make_trainer(monitor, optimizer=optimizer, **halve), 2)
    fit(trainer)
    assert monitor.rows == [
        {"update": update, "lr": 0.5 ** (update + 2), "momentum": 0.5, "lr.1": 0.5 ** (update + 1), "momentum.1": 0}
        for update in (2, 4, 6, 8)
    ]
    assert not trainer.optimizers["optimizer"]._optimizer_step_pre_hooks


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """In float64."""
    assert parameter.grad is not None
    return parameter.grad.double()


def norms_by_hand(model: nn.Module, clip_norm: float, num_updates: int) -> list[dict[str, float]]:
    """The same training in a plain loop: the norms before each update, in float64."""
    rows = []
    x, y = DATA.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(num_updates):
        batch = slice(update % 3 * 4, update % 3 * 4 + 4)
        loss = nn.functional.mse_loss(model(x[batch]), y[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        named = [(name, p.detach().double(), gradient_of(p)) for name, p in model.named_parameters()]
        row: dict[str, float] = {"update": update + 1}
        for layer in ("", "0", "1"):
            parts = [(p, g) for name, p, g in named if name.startswith(layer)]
            suffix = f".{layer}" if layer else ""
            row[f"grad_norm{suffix}"] = sum(g.square().sum().item() for _, g in parts) ** 0.5
            row[f"param_norm{suffix}"] = sum(p.square().sum().item() for p, _ in parts) ** 0.5
        rows.append(row)
        optimizer.step()
    return rows


def test_norms_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """After clipping and before every second update; a log has the same values; the hooks are removed."""
    path = tmp_path / "log.jsonl"
    norms = Norms(every=2, layers=True)
    trainer = make_trainer(norms, JsonLinesLog(path, every=2), clip_norm=0.5)
    by_hand = norms_by_hand(copy.deepcopy(trainer.model), 0.5, 6)[1::2]
    fit(trainer, 2)
    assert [set(row) for row in norms.rows] == [set(row) for row in by_hand]
    for row, expected in zip(norms.rows, by_hand, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    logged = [row for row in map(json.loads, path.read_text().splitlines()) if row["row"] == "update"]
    for row, expected in zip(logged, by_hand, strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert not trainer.optimizers["optimizer"]._optimizer_step_pre_hooks


def test_norms_wait_for_no_device_between_updates() -> None:
    """Values stay tensors until they are read, as reading waits for the device."""
    norms, seen = Norms(every=1), []
    look = Each("on_update_end", lambda run: seen.append(run.values["grad_norm"]))
    fit(make_trainer(norms, look))
    assert all(isinstance(value, torch.Tensor) for value in seen)
    assert [row["grad_norm"] for row in norms.rows] == [value.item() for value in seen]


def test_monitors_leave_no_hook_when_training_fails() -> None:
    """The notebook's optimizer has no hooks left."""

    def fail(run: Any) -> None:
        raise ValueError("as a user's callback may")

    trainer = make_trainer(Norms(every=1), LRMonitor(every=1), Each("on_epoch_end", fail))
    with pytest.raises(ValueError, match="as a user's"):
        fit(trainer)
    assert not trainer.optimizers["optimizer"]._optimizer_step_pre_hooks


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_norms_name_the_optimizer_when_there_are_several(order: str) -> None:
    """As in a GAN: each of its own parameters, when it steps, whichever steps first."""
    trainer = make_trainer(norms := Norms(every=1), rates := LRMonitor(every=1))
    first, second = trainer.model.children()
    trainer.optimizers = {
        "a": torch.optim.SGD(first.parameters(), lr=0.1),
        "b": torch.optim.SGD(second.parameters(), lr=0.2),
    }
    weight = torch.cat([p.detach().flatten() for p in second.parameters()]).norm().item()

    def train_batch(run: Any, batch: Any) -> torch.Tensor:
        with run.loop.accumulate(run.wrapped):
            loss = nn.functional.mse_loss(run.wrapped(batch[0]), batch[1])
            run.loop.backward(loss)
        for name in order:
            run.loop.step(run.optimizers[name])
        return loss

    trainer.train_batch = train_batch  # type: ignore[method-assign]
    fit(trainer)
    assert rates.rows[0] == {"update": 1, "lr.a": 0.1, "lr.b": 0.2}
    assert set(norms.rows[0]) == {"update", "grad_norm.a", "param_norm.a", "grad_norm.b", "param_norm.b"}
    assert norms.rows[0]["param_norm.b"] == pytest.approx(weight)
