# SPDX-License-Identifier: Apache-2.0
"""The same training with ddpilot, Accelerate and Fabric, each written as its own pages write it.

113 samples in batches of 12 of all ranks together, accumulation 3, clipping, momentum, a schedule. By default
Accelerate and Fabric read a batch size as that of each process: it is divided by their number. `is_closest=True` trains
with the settings that bring each closest to one process: see `make_accelerator` and `make_fabric_loader`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.small_models import GLOBAL_BATCH_SIZE, accuracy, loss_fn, make_data, make_model
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap

ACCUMULATION = 3
MAX_NORM = 0.5
NUM_VALIDATION = 37
SEED = 3


class Learnt(TypedDict):
    """What a rank knows after training."""

    losses: list[float]
    """Of each batch, over all ranks."""
    weights: dict[str, torch.Tensor]
    metric: float
    num_updates: int
    lr: list[Any]


def make_parts(kind: str) -> tuple[nn.Module, SGD, StepLR]:
    """A model, its optimizer and its schedule."""
    model = make_model(kind)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, StepLR(optimizer, 10, 0.9)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, by name."""
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def train_with_loop(
    kind: str, num_epochs: int, shuffle: bool = True, batch_split: Mapping[int, list[float]] | None = None
) -> Learnt:
    """With `ddpilot.Loop`; `batch_split` by the number of ranks."""
    loop = Loop(seed=SEED, accumulate=ACCUMULATION)
    model, optimizer, scheduler = make_parts(kind)
    model, optimizer = loop.prepare(model, optimizer)
    options = {"global_batch_size": GLOBAL_BATCH_SIZE, "batch_split": (batch_split or {}).get(loop.world_size)}
    loader = loop.loader(make_data(kind), shuffle=shuffle, **options)
    losses = []
    for _ in loop.epochs(num_epochs):
        for x, y in loop.batches(loader):
            count = int((y != -100).sum()) if y.ndim > 1 else None
            with loop.accumulate(model):
                loss = loss_fn(model(x), y)
                loop.backward(loss, count=count)
            losses.append(loop.reduce(loss, count=count).item())
            loop.clip_grad_norm_(model.parameters(), MAX_NORM)
            loop.step(optimizer, scheduler)
    validation = loop.loader(make_data(kind, NUM_VALIDATION), **options)
    metric = loop.evaluate(model, validation, {"accuracy": accuracy})["accuracy"]
    weights = weights_of(unwrap(model))
    return Learnt(
        losses=losses, weights=weights, metric=metric, num_updates=loop.num_updates, lr=scheduler.get_last_lr()
    )


def make_accelerator(is_closest: bool) -> Any:
    """An Accelerator in its default settings, or in those that bring it closest to the numbers of one process."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(SEED)
    options: dict[str, Any] = {}
    if is_closest:
        data = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=SEED)
        options = {"dataloader_config": data, "step_scheduler_with_optimizer": False}
    return Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, **options)


def train_with_accelerate(kind: str, num_epochs: int, shuffle: bool = True, is_closest: bool = False) -> Learnt:
    """With Accelerate; `is_closest` also drops the ragged last batch, which it would fill up with other samples."""
    accelerator = make_accelerator(is_closest)
    size = GLOBAL_BATCH_SIZE if is_closest else GLOBAL_BATCH_SIZE // accelerator.num_processes
    loader: Any = DataLoader(make_data(kind), batch_size=size, shuffle=shuffle, drop_last=is_closest)
    validation: Any = DataLoader(make_data(kind, NUM_VALIDATION), batch_size=size)
    prepared = accelerator.prepare(*make_parts(kind), loader, validation)
    model, optimizer, scheduler, loader, validation = prepared
    losses, num_updates = [], 0
    for _ in range(num_epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = loss_fn(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                if accelerator.sync_gradients or not is_closest:
                    scheduler.step()
                optimizer.zero_grad()
            num_updates += accelerator.sync_gradients
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    model.eval()
    right = []
    with torch.no_grad():
        for x, y in validation:
            right.append(accuracy(*accelerator.gather_for_metrics((model(x), y))))
    weights = weights_of(accelerator.unwrap_model(model))
    metric = torch.cat(right).mean().item()
    lr = scheduler.get_last_lr()
    accelerator.free_memory()
    return Learnt(losses=losses, weights=weights, metric=metric, num_updates=num_updates, lr=lr)


def make_fabric_loader(fabric: Any, data: Any, shuffle: bool, is_closest: bool) -> Any:
    """Fabric's own division of the samples, or a `DistributedSampler` at any number of ranks, one included."""
    size = GLOBAL_BATCH_SIZE // fabric.world_size
    if not is_closest:
        return fabric.setup_dataloaders(DataLoader(data, batch_size=size, shuffle=shuffle))
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, fabric.world_size, fabric.global_rank, shuffle=shuffle, seed=SEED, drop_last=True
    )
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=True)
    return fabric.setup_dataloaders(loader, use_distributed_sampler=False)


def train_with_fabric(kind: str, num_epochs: int, shuffle: bool = True, is_closest: bool = False) -> Learnt:
    """With Lightning Fabric; `is_closest` also drops the ragged last batch, which it would fill up."""
    from lightning.fabric import Fabric

    world_size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(SEED, verbose=False)
    module, plain, scheduler = make_parts(kind)
    model, optimizer = fabric.setup(module, plain)
    loader = make_fabric_loader(fabric, make_data(kind), shuffle, is_closest)
    losses, num_updates = [], 0
    for epoch in range(num_epochs):
        if is_closest:
            loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, start=1):
            is_update = number % ACCUMULATION == 0 or number == len(loader)
            with fabric.no_backward_sync(model, enabled=not is_update):
                loss = loss_fn(model(x), y)
                fabric.backward(loss / ACCUMULATION)
            mean: Any = fabric.all_reduce(loss.detach(), reduce_op="mean")
            losses.append(mean.item())
            if is_update:
                fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                num_updates += 1
    metric = evaluate_with_fabric(fabric, model, kind)
    weights = weights_of(model.module)
    return Learnt(losses=losses, weights=weights, metric=metric, num_updates=num_updates, lr=scheduler.get_last_lr())


def evaluate_with_fabric(fabric: Any, model: nn.Module, kind: str) -> float:
    """The accuracy over what the ranks gathered, as Fabric's pages write it."""
    model.eval()
    data = DataLoader(make_data(kind, NUM_VALIDATION), batch_size=GLOBAL_BATCH_SIZE // fabric.world_size)
    right = []
    with torch.no_grad():
        for x, y in fabric.setup_dataloaders(data):
            output, target = fabric.all_gather((model(x), y))
            is_joined = fabric.world_size > 1
            right.append(
                accuracy(output.flatten(0, 1), target.flatten(0, 1)) if is_joined else accuracy(output, target)
            )
    return torch.cat(right).mean().item()
