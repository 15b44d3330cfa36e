# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the resume tests run: a training that saves often, writes down its samples, and can be killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from ddpilot.training.loop import Loop
from ddpilot.training.wrapping import unwrap

NUM_SAMPLES = 53
GLOBAL_BATCH_SIZE = 8
NUM_EPOCHS = 3
ACCUMULATION = 2


class Kill(TypedDict):
    """How a run ends before its time: `rank` gets a signal at batch `batch` of epoch `epoch`."""

    how: str
    """"SIGKILL", "SIGTERM", "SIGUSR1", or "save": SIGKILL as soon as a checkpoint is being written."""
    rank: int
    epoch: int
    batch: int


def arm(kill: Kill, folder: Path) -> None:
    """End this process as `kill` says."""
    if kill["how"] != "save":
        os.kill(os.getpid(), getattr(signal, kill["how"]))
        return

    def wait_for_a_save() -> None:
        while not any(name.startswith(".writing-") for name in os.listdir(folder)):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_a_save, daemon=True).start()


def make_data() -> TensorDataset:
    """Inputs, targets and numbers of samples."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(NUM_SAMPLES))


def make_model(dropout: float) -> nn.Module:
    """Three layers; with dropout, BatchNorm too."""
    norm = nn.BatchNorm1d(8) if dropout else nn.Identity()
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def train(
    folder: Path,
    *,
    kill: Kill | None = None,
    dropout: float = 0.0,
    every: int = 1,
    shard: Any = None,
    log: Path | None = None,
) -> dict[str, Any]:
    """Train for three epochs, from the latest checkpoint in `folder` on, with one made every `every` updates.

    Each rank appends its samples of each batch to a file in `log`, before the update. Returns where it began, and what
    it has at the end.
    """
    torch.set_default_dtype(torch.float64)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    loop = Loop(seed=3, accumulate=ACCUMULATION, checkpoint_dir=folder, keep=2, save_every_updates=every)
    model = make_model(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    average = AveragedModel(model)
    model, optimizer = loop.prepare(model, optimizer, shard=shard)
    scheduler, average = loop.prepare(scheduler, average)
    loader = loop.loader(make_data(), global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
    loop.resume()
    first = loop.epoch, loop.next_batch
    for epoch in loop.epochs(NUM_EPOCHS):
        for x, y, numbers in loop.batches(loader):
            assert loop.batch is not None
            if log is not None:
                with open(log / f"rank-{loop.rank}", "a") as file:
                    file.write(json.dumps([epoch, loop.batch.index, numbers.tolist()]) + "\n")
            if kill is not None and (loop.rank, epoch, loop.batch.index) == (kill["rank"], kill["epoch"], kill["batch"]):
                arm(kill, folder)
            with loop.accumulate(model):
                loop.backward(nn.functional.mse_loss(model(x), y))
            if loop.step(optimizer, scheduler):
                average.update_parameters(unwrap(model))
    metric = loop.evaluate(average, loader, {"error": error}, forward=lambda model, batch: (model(batch[0]), batch[1]))
    kept = {**unwrap(model).state_dict(), **{f"average.{n}": v for n, v in average.module.state_dict().items()}}
    return {
        "first": first,
        "num_updates": loop.num_updates,
        "lr": scheduler.get_last_lr(),
        "metric": metric["error"],
        "weights": {name: value.detach().clone() for name, value in kept.items()},
    }


def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Per sample."""
    return (output - target).abs().mean(1)


def read_log(folder: Path) -> dict[tuple[int, int], list[int]]:
    """The samples of all ranks in each batch, by epoch and batch."""
    taken: dict[tuple[int, int], list[int]] = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            epoch, batch, numbers = json.loads(line)
            taken.setdefault((epoch, batch), []).extend(numbers)
    return taken
