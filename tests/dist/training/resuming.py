# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the resume tests run: a training that saves often, writes down its samples, and can be killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from ddpilot.errors import CheckpointError
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap

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
            if kill is not None and (loop.rank, epoch, loop.batch.index) == (
                kill["rank"],
                kill["epoch"],
                kill["batch"],
            ):
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


def said_of(call: Callable[[], object]) -> str:
    """What a call that has to fail says."""
    try:
        call()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def small_loop(folder: Path, width: int = 4) -> tuple[Loop, nn.Module, Any]:
    """A loop over two batches of two, with a model of `width` outputs."""
    loop = Loop(checkpoint_dir=folder)
    model = loop.prepare(nn.Linear(2, width))
    return loop, model, loop.loader(TensorDataset(torch.ones(4, 2)), global_batch_size=2)


def run_small(loop: Loop, model: nn.Module, loader: Any, num_epochs: int, limits: dict[int, int]) -> None:
    """Train; before epoch `n`, files of rank 0 may grow to `limits[n]` bytes, where it is given."""
    for epoch in loop.epochs(num_epochs):
        loop._checkpointer.wait()  # what is being written belongs to the epoch before
        if loop.group.is_rank_zero and epoch in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[epoch], resource.RLIM_INFINITY))
        for (x,) in loop.batches(loader):
            loop.backward(model(x).mean())


def fail_together(folder: Path) -> list[str]:
    """What this rank is told where one of them cannot go on, or where the directory is none."""
    (folder / "file").write_text("")
    said = [said_of(lambda: Loop(checkpoint_dir=folder / "file"))]
    loop, model, loader = small_loop(folder / "ckpt")
    run_small(loop, model, loader, 1, {})
    before = unwrap(model).state_dict()["weight"].clone()
    # One rank alone has another model.
    other = Loop(checkpoint_dir=folder / "ckpt")
    wide = nn.Linear(2, 5 if loop.rank == 1 else 4)
    other.track(model=wide)
    weight = wide.weight.clone()
    said.append(said_of(other.resume))
    said.append(said_of(lambda: loop.load(unwrap(model) if loop.rank else nn.Linear(2, 3), folder / "ckpt")))
    said.append(said_of(lambda: loop.load(model, folder / ("ckpt" if loop.rank else "nowhere"))))
    assert torch.equal(wide.weight, weight)
    assert torch.equal(unwrap(model).state_dict()["weight"], before)
    loop.load(model, folder / "ckpt")
    return said


def train_on_a_full_disk(folder: Path) -> tuple[int, list[str]]:
    """Four epochs; from the second on nothing fits, in the fourth there is room again. Where it ended, and what is."""
    loop, model, loader = small_loop(folder, 50_000)
    run_small(loop, model, loader, 4, {1: 10_000, 3: resource.RLIM_INFINITY})
    return loop.epoch, sorted(os.listdir(folder))
