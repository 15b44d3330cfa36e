# SPDX-License-Identifier: Apache-2.0
"""One small training loop as it is written with each library: the same model, data and batches per rank.

Each takes a `Job` and returns a function that trains one epoch and returns the moments at which its steps began.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpilot

BATCH_SIZE_PER_RANK = 8
WIDTH = 8

Moment = tuple[float, float]
"""Seconds of the clock, and of processor time of all threads of this rank."""
Epoch = Callable[[], list[Moment]]


def now() -> Moment:
    """A step begins."""
    return time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Job:
    """What all loops do."""

    num_steps: int
    """Of an epoch."""
    num_matmuls: int
    """Products of two 256 x 256 matrices that every step computes besides."""
    batch_size_per_rank: int = BATCH_SIZE_PER_RANK

    def dataset(self) -> TensorDataset:
        """Just as many samples as the ranks need for `num_steps` full batches."""
        num = self.num_steps * BATCH_SIZE_PER_RANK * dist.get_world_size()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num, WIDTH, generator=generator)
        return TensorDataset(x, x.argmax(1))

    def model(self) -> nn.Module:
        """So small that what is around it shows."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean of the batch, after the rest of the step's work."""
        if self.num_matmuls:
            matrix = torch.full((256, 256), 1 / 256)
            for _ in range(self.num_matmuls):
                matrix = matrix @ matrix
        return nn.functional.cross_entropy(model(x), y)


def by_hand(job: Job, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> Epoch:
    """What a careful person writes."""
    device = torch.device("cpu")
    dataset = job.dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=job.batch_size_per_rank, sampler=sampler)
    model = wrap(job.model())
    optimizer = job.optimizer(model)
    epochs = iter(range(10**9))

    def epoch() -> list[Moment]:
        stamps = []
        sampler.set_epoch(next(epochs))
        for x, y in loader:
            stamps.append(now())
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss = job.loss(model, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return stamps

    return epoch


def by_ddpilot(job: Job, *, shard: Any = None, **options: Any) -> Epoch:
    """`Loop`, with everything that it does unasked."""
    loop = ddpilot.Loop(seed=0, **options)
    model = job.model()
    model, optimizer = loop.prepare(model, job.optimizer(model), shard=shard)
    loader = loop.loader(job.dataset(), batch_size_per_rank=job.batch_size_per_rank, shuffle=True)

    def epoch() -> list[Moment]:
        stamps = []
        for _ in loop.epochs(loop.epoch + 1):
            for x, y in loop.batches(loader):
                stamps.append(now())
                with loop.accumulate(model):
                    loop.backward(job.loss(model, x, y))
                loop.step(optimizer)
        return stamps

    return epoch


def by_accelerate(job: Job) -> Epoch:
    """Hugging Face Accelerate in its default settings."""
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = job.model()
    loader = DataLoader(job.dataset(), batch_size=BATCH_SIZE_PER_RANK, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, job.optimizer(model), loader)

    def epoch() -> list[Moment]:
        stamps = []
        for x, y in loader:
            stamps.append(now())
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(job.loss(model, x, y))
                optimizer.step()
        return stamps

    return epoch


def by_fabric(job: Job) -> Epoch:
    """Lightning Fabric with DDP, told what there is; its accumulation is a context of one's own, left out."""
    fabric_module = importlib.import_module("lightning.fabric")
    fabric = fabric_module.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    model = job.model()
    model, optimizer = fabric.setup(model, job.optimizer(model))
    loader = fabric.setup_dataloaders(DataLoader(job.dataset(), batch_size=BATCH_SIZE_PER_RANK, shuffle=True))

    def epoch() -> list[Moment]:
        stamps = []
        for x, y in loader:
            stamps.append(now())
            optimizer.zero_grad()
            fabric.backward(job.loss(model, x, y))
            optimizer.step()
        return stamps

    return epoch


def by_lightning(job: Job) -> Epoch:
    """Lightning's Trainer with DDP and everything turned off that can be: logger, progress, checkpoints."""
    pytorch = importlib.import_module("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    base: Any = pytorch.LightningModule

    class Module(base):  # type: ignore[misc]
        """The model with its step."""

        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()
            self.stamps: list[Moment] = []

        def training_step(self, batch: Any, _number: int) -> torch.Tensor:
            """Forward and loss; the library does the rest."""
            self.stamps.append(now())
            return job.loss(self.model, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """As all others have it."""
            return job.optimizer(self)

    loader = DataLoader(job.dataset(), batch_size=BATCH_SIZE_PER_RANK, shuffle=True)
    module = Module()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)

    def epoch() -> list[Moment]:
        module.stamps = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pytorch.Trainer(
                accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", max_epochs=1, **off
            )
            trainer.fit(module, loader)
        return module.stamps

    return epoch


LOOPS: dict[str, Callable[[Job], Epoch]] = {
    "by hand": by_hand,
    "ddpilot": by_ddpilot,
    "Accelerate": by_accelerate,
    "Fabric": by_fabric,
    "Lightning": by_lightning,
}
"""In the order in which they take turns."""


def let_peers_import() -> None:
    """Lightning imports torchvision where it is installed, which a build for another torch cannot do."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    importlib.import_module("tests.notebook.shims.sitecustomize")
