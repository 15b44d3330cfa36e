# SPDX-License-Identifier: Apache-2.0
"""A project that trains one model: by hand with plain PyTorch in one process, and with a `Loop` on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, default_collate

import ddpilot
from ddpilot.data.global_batches import Plan

Numbers = dict[str, list[torch.Tensor]]
"""What a project is compared by: the loss of each batch, the weights and buffers, and what else it computes."""
Losses = Mapping[str, Any]
"""By name: a mean over the samples, or a pair of a mean and the number of things that it is a mean over."""

GLOBAL_BATCH_SIZE = 7
NUM_SAMPLES = 29
"""The last batch of an epoch has one sample, so that of two or three ranks all but one have none."""


class Project(Protocol):
    """Trains the same in two ways."""

    def by_hand(self) -> Numbers:
        """In one process, with nothing but PyTorch."""

    def with_loop(self) -> Numbers:
        """On every rank, with `ddpilot.Loop`."""


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers in float64, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Integers from `low` to `high` - 1, the same in every process."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def order_of(epoch: int, num_samples: int = NUM_SAMPLES, **options: Any) -> list[list[int]]:
    """The sample numbers of each global batch, as the documentation of the data says."""
    options = {"shuffle": True, **options}
    plan = Plan(num_samples=num_samples, global_batch_size=GLOBAL_BATCH_SIZE, world_size=1, seed=0, **options)
    order = plan.order(epoch).tolist()
    return [order[start : start + GLOBAL_BATCH_SIZE] for start in range(0, len(order), GLOBAL_BATCH_SIZE)]


def state_of(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the weights and buffers."""
    return [value.detach().clone() for value in ddpilot.unwrap(model).state_dict().values()]


def make_loop(**options: Any) -> ddpilot.Loop:
    """A silent one with the seed of `order_of`."""
    return ddpilot.Loop(seed=0, progress=False, **options)


def sgd(parameters: Any) -> Optimizer:
    """The optimizer of a project that asks for no other one."""
    return SGD(parameters, lr=0.05, momentum=0.9)


def update(loss: torch.Tensor, *optimizers: Optimizer) -> None:
    """What a loop by hand does with the loss of a batch."""
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def take_pair(loss: Any, num_samples: int) -> tuple[torch.Tensor, float]:
    """The loss, and what it is a mean over."""
    return (loss[0], float(loss[1])) if isinstance(loss, tuple) else (loss, float(num_samples))


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A model, its data, and losses that are means over samples or over something that the batch is counted in."""

    make_model: Callable[[], nn.Module]
    """Called with the default dtype float64 and torch's seed set to 1."""
    losses: Callable[[nn.Module, Any], Losses]
    """Of a model and a batch."""
    dataset: Dataset[Any]
    count: Callable[[Any], int] = field(default=lambda batch: len(batch[0]))
    """Samples of a batch."""
    make_optimizer: Callable[[Any], Optimizer] = sgd
    make_scheduler: Callable[[Optimizer], Any] | None = None
    num_epochs: int = 3
    accumulate: int = 1
    max_norm: float | None = None
    collate_fn: Callable[[list[Any]], Any] = default_collate
    loader_options: Mapping[str, Any] = field(default_factory=dict)
    """Of `loop.loader`; those that choose samples are taken by hand as well."""
    after_update: Callable[[nn.Module], None] | None = None
    batches: Callable[[int], Iterable[Any]] | None = None
    """By hand: the batches of an epoch, where `order_of` does not say them."""
    make_loader: Callable[[ddpilot.Loop], Any] | None = None
    """On ranks: what to iterate over, where that is not `loop.loader(dataset, ...)`."""

    def make_parts(self) -> tuple[nn.Module, Optimizer, Any]:
        """The model, its optimizer and its scheduler."""
        torch.manual_seed(1)
        model = self.make_model()
        optimizer = self.make_optimizer(model.parameters())
        return model, optimizer, self.make_scheduler(optimizer) if self.make_scheduler else None

    def batches_by_hand(self, epoch: int) -> Iterator[Any]:
        """The global batches, collated as a whole."""
        if self.batches is not None:
            yield from self.batches(epoch)
            return
        for numbers in order_of(epoch, **{"num_samples": len(self.dataset), **self.loader_options}):  # type: ignore[arg-type]
            yield self.collate_fn([self.dataset[number] for number in numbers])

    def own_loader(self, loop: ddpilot.Loop) -> Any:
        """The dataset, divided by the loop."""
        options: dict[str, Any] = {"shuffle": True, "collate_fn": self.collate_fn, **self.loader_options}
        return loop.loader(self.dataset, global_batch_size=GLOBAL_BATCH_SIZE, **options)

    def by_hand(self) -> Numbers:
        """Each loss is a mean over all its things of the update, also where that has several batches."""
        model, optimizer, scheduler = self.make_parts()
        losses = []
        for epoch in range(self.num_epochs):
            batches = list(self.batches_by_hand(epoch))
            for start in range(0, len(batches), self.accumulate):
                found = []
                for batch in batches[start : start + self.accumulate]:
                    size = self.count(batch)
                    found.append({name: take_pair(loss, size) for name, loss in self.losses(model, batch).items()})
                    losses.append(torch.stack([loss.detach() for loss, _ in found[-1].values()]).sum())
                totals = {name: sum(each[name][1] for each in found) or 1 for name in found[0]}
                sum(
                    (loss * (count / totals[name]) for each in found for name, (loss, count) in each.items()),
                    start=torch.zeros(()),
                ).backward()  # type: ignore[no-untyped-call]
                if self.max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
                if self.after_update:
                    self.after_update(model)
        return {"losses": losses, "state": state_of(model)}

    def with_loop(self) -> Numbers:
        """As the documentation of the loop says."""
        loop = make_loop(accumulate=self.accumulate)
        plain, optimizer, scheduler = self.make_parts()
        model, optimizer = loop.prepare(plain, optimizer)
        loader = self.make_loader(loop) if self.make_loader is not None else self.own_loader(loop)
        losses = []
        for _ in loop.epochs(self.num_epochs):
            for batch in loop.batches(loader):
                with loop.accumulate(model):
                    found = dict(self.losses(model, batch))
                    assert loop.batch is not None
                    pairs = [take_pair(loss, loop.batch.count) for loss in found.values()]
                    if len(pairs) > 1:
                        loop.backward(found)
                    elif isinstance(next(iter(found.values())), tuple):
                        loop.backward(pairs[0][0], count=pairs[0][1])
                    else:
                        loop.backward(pairs[0][0])
                losses.append(sum((loop.reduce(loss, count=count) for loss, count in pairs), start=torch.zeros(())))
                if self.max_norm is not None:
                    loop.clip_grad_norm_(model.parameters(), self.max_norm)
                if loop.step(optimizer, scheduler) and self.after_update:
                    self.after_update(plain)
        return {"losses": losses, "state": state_of(model)}
