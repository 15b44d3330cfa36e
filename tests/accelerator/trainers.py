# SPDX-License-Identifier: Apache-2.0
"""What tests of `Trainer` on the emulated accelerator send to its ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpilot
from tests.dist.trainer.bodies import BATCH_SIZE, make_data, make_trainer

ROW = 1 << 18
"""Numbers of four bytes that `Wide` makes of each sample: 1 MiB."""


class Places(ddpilot.Callback):
    """Remembers on which device each rank trained, and how often the host waited in the updates after the first."""

    ranks = "all"

    def __init__(self, num_warm_up: int = 4) -> None:
        self.devices: list[str] = []
        self.waits: list[dict[str, int]] = []
        self._num_warm_up = num_warm_up

    def on_fit_start(self, run: ddpilot.Run) -> None:
        """Where the parameters are."""
        self.devices = sorted({str(parameter.device) for parameter in run.model.parameters()})

    def on_update_end(self, run: ddpilot.Run) -> None:
        """How often the host waited since the last one, by kind."""
        device: Any = torch.get_device_module("emu")
        if run.update > self._num_warm_up:
            self.waits.append({kind: num for kind, num in device.host_syncs().items() if num})
        device.reset_host_syncs()


class Limits(ddpilot.Callback):
    """Gives rank 1's device little memory."""

    ranks = "all"

    def on_fit_start(self, run: ddpilot.Run) -> None:
        """Of all other devices the memory stays as it is."""
        if run.loop.rank == 1:
            torch.get_device_module("emu").set_memory_limit(32 << 20)


class Wide(nn.Module):
    """A model with large activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(x).expand(-1, ROW).square().mean(1, keepdim=True))


class Noisy(nn.Module):
    """A model with dropout, whose masks the device draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 1)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layers(x))


def data_with_nan(num_samples: int, at: int) -> TensorDataset:
    """Samples in order, one of which is NaN."""
    x = torch.linspace(-1, 1, 4 * num_samples, dtype=torch.float64).reshape(num_samples, 4)
    x[at, 2] = math.nan
    return TensorDataset(x, x[:, :1] * 0.5)


def make_noisy(launcher: ddpilot.Launcher) -> ddpilot.Trainer:
    """The same weights every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        model = Noisy()
    return ddpilot.Trainer(model, nn.functional.mse_loss, make_adam, launcher=launcher, seed=7)


def make_adam(parameters: Any) -> torch.optim.Optimizer:
    """With state on the device."""
    return torch.optim.Adam(parameters, lr=0.01)


def evaluate_then_fit() -> tuple[str, list[float]]:
    """Where a trainer on a rank has its model, and the weights, after an evaluation and a fit."""
    trainer = make_trainer(ema=None)
    trainer.evaluate(make_data(21, first=60))
    trainer.fit(make_data(), epochs=1, global_batch_size=BATCH_SIZE, progress=False)
    weights = [value for weight in trainer.model.parameters() for value in weight.flatten().tolist()]
    return next(trainer.model.parameters()).device.type, weights
