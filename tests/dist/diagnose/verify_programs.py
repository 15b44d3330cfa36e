# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call,operator,assignment,arg-type,var-annotated,call-arg"
"""Programs that train a small model on their ranks, right or with one planted fault, for `verify`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset, TensorDataset

import ddpilot

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES, BATCH_SIZE = 96, 10, 3, 8


def make_data() -> TensorDataset:
    """Samples with features of a size that grows, so that parts of the dataset differ."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator) * torch.linspace(0.5, 2, NUM_SAMPLES)[:, None]
    return TensorDataset(x, torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator))


def make_model(*layers: nn.Module) -> nn.Module:
    """A small model, with `layers` in the middle."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, 16), *layers, nn.ReLU(), nn.Linear(16, NUM_CLASSES))


def make_loader(dataset: Any = None) -> DataLoader[Any]:
    """Batches of this rank's part of `dataset`."""
    dataset = make_data() if dataset is None else dataset
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=DistributedSampler(dataset, shuffle=True, seed=3))


def train(
    *,
    layers: Callable[[], tuple[nn.Module, ...]] = tuple,
    loader: Callable[[], Any] = make_loader,
    loss_fn: Callable[..., Any] = functional.cross_entropy,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    after_backward: Callable[[nn.Module], None] = lambda model: None,
    lr: Callable[[], float] = lambda: 0.1,
    seed: Callable[[], int] = lambda: 0,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> None:
    """Train for two epochs; every part can be replaced by a faulty one."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(seed())
        model = wrap(make_model(*layers()))
        optimizer = optimizer_class(model.parameters(), lr=lr())
        for _ in range(2):
            for x, y in loader():
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                after_backward(model)
                optimizer.step()


def rank() -> int:
    """This process's rank."""
    return dist.get_rank()


def world_size() -> int:
    """Number of ranks."""
    return dist.get_world_size()


# Right


def with_adam() -> None:
    """An optimizer that enlarges rounding."""
    train(optimizer_class=torch.optim.AdamW)


def with_dropout() -> None:
    """Other masks on each rank."""
    train(layers=lambda: (nn.Dropout(0.3),), seed=lambda: 0, wrap=_seeded_by_rank)


def _seeded_by_rank(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(100 + rank())
    return wrapped


def with_group_norm() -> None:
    """Statistics of each sample."""
    train(layers=lambda: (nn.GroupNorm(4, 16),))


def with_gradients_by_hand() -> None:
    """The mean of the ranks' gradients, without a wrapper."""
    train(wrap=_with_weights_of_rank_0, after_backward=_take_mean)


def _with_weights_of_rank_0(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return model


def _take_mean(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size()


def with_whole_batch_divided() -> None:
    """A global batch that every rank shuffles alike and takes its slice of."""
    train(loader=_slices)


def _slices() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = make_data().tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    for batch in order.split(16):
        mine = batch[rank() :: world_size()]
        yield x[mine], y[mine]


def with_loop() -> None:
    """A Loop, whose batches are global, with an uneven last one."""
    loop = ddpilot.Loop(seed=0)
    model = make_model(nn.Dropout(0.0))
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loop.batches(loop.loader(make_data(), global_batch_size=7, shuffle=True)):
        with loop.accumulate(model):
            loop.backward(functional.cross_entropy(model(x), y))
        loop.step(optimizer)


def with_trainer() -> None:
    """A Trainer on its ranks."""
    torch.manual_seed(0)
    trainer = ddpilot.Trainer(
        make_model(), functional.cross_entropy, lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    trainer.fit(make_data(), epochs=1, global_batch_size=16)


def returns_mean() -> dict[str, float]:
    """The mean loss over all ranks."""
    return {"loss": _evaluate(is_reduced=True)}


def _evaluate(*, is_reduced: bool) -> float:
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = make_data()
        for x, y in make_loader(Subset(data, range(48))):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        x, y = (each[rank() :: world_size()] for each in data.tensors)
        with torch.no_grad():
            total = torch.stack([functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(float(len(x)))])
        if is_reduced:
            dist.all_reduce(total)
        return float(total[0] / total[1])


# Faults


def loss_times_world_size() -> None:
    """The loss is multiplied by the number of ranks."""
    train(loss_fn=lambda output, y: functional.cross_entropy(output, y) * world_size())


def averaged_twice() -> None:
    """DDP averages, and then the program."""

    def divide(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad /= world_size()

    train(after_backward=divide)


def summed_by_hand() -> None:
    """Gradients are added and not divided."""

    def add(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    train(wrap=_with_weights_of_rank_0, after_backward=add)


def unequal_parts() -> None:
    """Rank 0 takes a quarter of each batch, the others the rest; DDP gives each the same weight."""

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = make_data().tensors
        loader = DataLoader(TensorDataset(x, y), batch_size=16)
        for x, y in loader:
            cut = len(x) if world_size() == 1 else 4
            yield (x[:cut], y[:cut]) if rank() == 0 else (x[cut:], y[cut:])

    train(loader=batches)


def ignored_targets() -> None:
    """Some targets do not count, another number of them on each rank."""
    x, y = make_data().tensors
    y = torch.where(torch.arange(len(y)) % 5 < 2, torch.full_like(y, -100), y)
    train(loader=lambda: make_loader(TensorDataset(x, y)))


def class_weights() -> None:
    """A mean by class weights, whose sum differs between ranks."""
    weight = torch.tensor([1.0, 5.0, 0.2])
    train(loss_fn=lambda output, y: functional.cross_entropy(output, y, weight=weight))


def own_permutation() -> None:
    """Each rank shuffles the whole dataset in its own order."""

    def batches() -> Any:
        data = make_data()
        generator = torch.Generator().manual_seed(rank())
        return DataLoader(data, batch_size=BATCH_SIZE, sampler=RandomSampler(data, generator=generator))

    train(loader=batches)


def same_batches() -> None:
    """All ranks train on all data."""
    train(loader=lambda: DataLoader(make_data(), batch_size=BATCH_SIZE))


def batch_norm() -> None:
    """Each rank normalizes with its own samples."""
    train(layers=lambda: (nn.BatchNorm1d(16),))


def same_noise() -> None:
    """All ranks have the same dropout masks."""
    train(layers=lambda: (nn.Dropout(0.3),))


class _WithHead(nn.Module):
    """A wrapped model, and a head that is not in the wrapper."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.body = DistributedDataParallel(model)
        self.head = nn.Linear(NUM_CLASSES, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def layer_outside() -> None:
    """A layer that no wrapper reduces."""
    train(wrap=_WithHead)


def bypassed() -> None:
    """The model inside the wrapper is called."""

    class Bypass(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.ddp = DistributedDataParallel(model)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.ddp.module(x)  # type: ignore[no-any-return]

    train(wrap=Bypass)


def left_in_no_sync() -> None:
    """Gradients stay local."""

    class Local(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.ddp = DistributedDataParallel(model)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.ddp.no_sync():
                return self.ddp(x)  # type: ignore[no-any-return]

    train(wrap=Local)


def scaled_learning_rate() -> None:
    """The learning rate grows with the number of ranks."""
    train(lr=lambda: 0.1 * world_size())


def seeded_by_world_size() -> None:
    """Another model at each number of ranks."""
    train(seed=lambda: 10 * world_size())


def seeded_by_rank() -> None:
    """Another model on each rank, and no wrapper that would send rank 0's."""
    train(seed=rank, wrap=lambda model: model, after_backward=_take_mean)


def clipped_before_reduced() -> None:
    """Each rank clips its own gradients, and then they are averaged."""

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        _take_mean(model)

    train(wrap=_with_weights_of_rank_0, after_backward=clip)


def augmented_by_process() -> None:
    """Noise from the generator of the process, which has drawn for other samples on one rank."""

    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + torch.randn(x.shape), y

    train(loader=lambda: make_loader(Noisy(*make_data().tensors)))


def sum_of_losses() -> None:
    """A sum over the batch, of which DDP takes the mean."""
    train(loss_fn=lambda output, y: functional.cross_entropy(output, y, reduction="sum"))


def loss_of_pairs() -> None:
    """A loss over pairs of samples: pairs across ranks are missing."""

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = output @ output.T
        return functional.cross_entropy(scores, torch.arange(len(y))) + functional.cross_entropy(output, y)

    train(loss_fn=loss_fn)


def unseeded() -> None:
    """Draws from generators that start at random."""
    train(seed=lambda: int(numpy.random.default_rng().integers(1 << 30)) + random.getrandbits(8))


def returns_own_loss() -> dict[str, float]:
    """The loss of one rank's samples."""
    return {"loss": _evaluate(is_reduced=False)}


def steps_without_samples() -> float:
    """No optimizer."""
    return 1.0


def alone_on_every_rank() -> None:
    """No process group, no loader: each rank does the whole work, on the same numbers."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        x = torch.randn(16, NUM_FEATURES)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), x.argmax(1) % NUM_CLASSES).backward()
        optimizer.step()


class FailsOnce(torch.optim.SGD):
    """An optimizer whose second step raises an exception."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        """Raise it, or step."""
        self.num_steps += 1
        if self.num_steps == 2:
            raise ArithmeticError
        return super().step(closure)


def sum_after_a_step_that_failed() -> None:
    """Gradients are multiplied by the number of ranks from the fourth update on; a step before has failed."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model())
        optimizer = FailsOnce(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(make_loader()):
            optimizer.zero_grad()
            (functional.cross_entropy(model(x), y) * (world_size() if number > 2 else 1)).backward()
            try:
                optimizer.step()
            except ArithmeticError:
                continue
