# SPDX-License-Identifier: Apache-2.0
"""`Trainer.find_batch_size` in this process: real allocations that fail, and nothing changed afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ddpilot import Trainer
from ddpilot.errors import LoopError
from tests.unit.trainer.callbacks.fits import DATA, fit, make_trainer


def test_find_batch_size_tries_the_trainers_own_step() -> None:
    """Its loss and its forward; afterwards it fits as if nothing had been."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(output) > 3:
            torch.empty(1 << 50)
        return torch.nn.functional.mse_loss(output, target)

    trainer, other = make_trainer(), make_trainer()
    trainer.loss_fn = loss_fn
    state = torch.get_rng_state()
    found = trainer.find_batch_size(DATA, nproc_per_node=0, max_per_rank=10, headroom=0)
    again = trainer.find_batch_size(DataLoader(DATA, batch_size=2), nproc_per_node=0, max_per_rank=10, headroom=0)
    assert (found.global_batch_size, again.global_batch_size) == (3, 3)
    assert torch.equal(torch.get_rng_state(), state)
    trainer.loss_fn = other.loss_fn
    fits = [fit(one).history.epochs[0]["loss"] for one in (trainer, other)]
    assert fits[0] == fits[1]


def test_find_batch_size_refuses_what_it_cannot_try() -> None:
    """An overridden step, and several optimizers."""

    class Own(Trainer):
        def train_batch(self, run: Any, batch: Any) -> Any:
            return super().train_batch(run, batch)

    base = make_trainer()
    own = Own(base.model, base.loss_fn, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(LoopError, match="an overridden `train_batch`, so the memory"):
        own.find_batch_size(DATA, nproc_per_node=0)
    base.optimizers |= {"second": torch.optim.SGD(base.model.parameters(), lr=0.1)}
    with pytest.raises(LoopError, match=r"2 optimizers, so .* Call ddpilot.find_batch_size\(loop"):
        base.find_batch_size(DATA, nproc_per_node=0)


def test_find_batch_size_starts_with_two_samples_with_batch_norm() -> None:
    """And refuses limits that make no sense, before a rank is started."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    trainer = Trainer(model, torch.nn.functional.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    found = trainer.find_batch_size(DATA, nproc_per_node=0, max_per_rank=10, headroom=0.9)
    assert [trial.per_rank for trial in found.trials] == [2, 4, 8, 10]
    assert found.per_rank == 2
    with pytest.raises(LoopError, match="`max_per_rank` is 1, and the model has BatchNorm"):
        trainer.find_batch_size(DATA, nproc_per_node=0, max_per_rank=1)
    with pytest.raises(LoopError, match="`max_per_rank` is 0. Pass a number of samples, 1 or more"):
        trainer.find_batch_size(DATA, nproc_per_node=2, max_per_rank=0)
