# SPDX-License-Identifier: Apache-2.0
"""Small trainers in float64 for these tests, and a plain loop in one process to compare them with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpilot
from ddpilot.data.global_batches import Plan
from tests.preload import BESIDES_TRAINER

NUM_SAMPLES = 53
"""With a global batch of 8: six full batches and one of five; accumulation groups 3, 3 and 1."""
BATCH_SIZE = 8
ACCUMULATE = 3
CLIP_NORM = 0.5
DECAY = 0.9


def launcher() -> ddpilot.Launcher:
    """With a hard limit."""
    return ddpilot.Launcher(timeout_s=100, preload=BESIDES_TRAINER)


def make_data(num_samples: int = NUM_SAMPLES, first: int = 0) -> TensorDataset:
    """Points and a target that a small network can learn."""
    x = (
        torch.linspace(-1, 1, 4 * 100, dtype=torch.float64)
        .reshape(4, 100)
        .t()
        .contiguous()[first : first + num_samples]
    )
    return TensorDataset(x, (x[:, :2] * x[:, 2:]).sum(1, keepdim=True))


def make_model() -> nn.Module:
    """The same weights every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """With state of its own."""
    return torch.optim.AdamW(parameters, lr=0.05)


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """Changes with every update."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric per sample."""
    return (output - target).abs()


def make_trainer(**options: Any) -> ddpilot.Trainer:
    """With everything that changes numbers."""
    given: dict[str, Any] = {
        "metrics": {"distance": distance},
        "scheduler": make_scheduler,
        "ema": DECAY,
        "clip_norm": CLIP_NORM,
        "accumulate": ACCUMULATE,
        "launcher": launcher(),
    }
    return ddpilot.Trainer(make_model(), nn.functional.mse_loss, make_optimizer, **{**given, **options})


def train_plainly(num_epochs: int, seed: int = 0) -> dict[str, Any]:
    """The same in plain PyTorch: no ddpilot but for the order of the samples."""
    model = make_model()
    average = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler(optimizer)
    x, y = make_data().tensors
    plan = Plan(NUM_SAMPLES, BATCH_SIZE, world_size=1, seed=seed, shuffle=True)
    updates, losses, num_updates = [], [], 0
    for epoch in range(num_epochs):
        for ids in torch.split(torch.as_tensor(plan.order(epoch)), BATCH_SIZE * ACCUMULATE):
            loss = nn.functional.mse_loss(model(x[ids]), y[ids])
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            num_updates += 1
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.copy_(fast if num_updates == 1 else DECAY * slow + (1 - DECAY) * fast)
            updates.append(loss.item())
            losses.append((epoch, loss.item() * len(ids)))
    x_val, y_val = make_data(21, first=60).tensors
    with torch.no_grad():
        output = average(x_val)
    return {
        "weights": model.state_dict(),
        "average": average.state_dict(),
        "moments": [state["exp_avg"] for state in optimizer.state.values()],
        "updates": updates,
        "losses": [sum(v for e, v in losses if e == epoch) / NUM_SAMPLES for epoch in range(num_epochs)],
        "val_loss": nn.functional.mse_loss(output, y_val).item(),
        "val_distance": distance(output, y_val).mean().item(),
        "lr": scheduler.get_last_lr()[0],
        "output": output,
    }
