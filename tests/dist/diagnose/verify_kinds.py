# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call,operator,assignment,arg-type,var-annotated,call-arg"
"""Programs with other optimizers, loaders, wrappers and precisions, right or with one fault, for `verify`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

import ddpilot
from tests.dist.diagnose.verify_programs import (
    BATCH_SIZE,
    NUM_CLASSES,
    NUM_FEATURES,
    make_data,
    make_loader,
    make_model,
    rank,
    train,
    world_size,
)

# Right


def with_two_optimizers() -> None:
    """A generator and a discriminator, which step in turn."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        generator = DistributedDataParallel(nn.Linear(4, NUM_FEATURES))
        critic = DistributedDataParallel(nn.Linear(NUM_FEATURES, 1), broadcast_buffers=False)
        steps = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (generator, critic)]
        for x, _ in make_loader():
            made = generator(x[:, :4])
            steps[1].zero_grad()
            (critic(made.detach()).mean() - critic(x).mean()).backward()
            steps[1].step()
            steps[0].zero_grad()
            (-critic.module(made).mean()).backward()
            steps[0].step()


def with_accumulation() -> None:
    """Two batches for each update, of which the first is not reduced."""
    _accumulate(is_reduced_last=True)


def _accumulate(*, is_reduced_last: bool) -> None:
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for number, (x, y) in enumerate(make_loader()):
                is_last = number % 2 == 1
                with nullcontext() if is_last == is_reduced_last else model.no_sync():
                    (functional.cross_entropy(model(x), y) / 2).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()


def with_autocast() -> None:
    """bfloat16, whose rounding is large."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for x, y in make_loader():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()


def with_scaler() -> None:
    """float16 with a GradScaler, which skips a step where a gradient is infinite."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        for _ in range(3):
            for x, y in make_loader():
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = functional.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


def with_closure() -> None:
    """LBFGS, whose steps compute gradients several times."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        for x, y in make_loader():

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)


def with_sharded_state() -> None:
    """An optimizer whose state is divided among the ranks."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        for x, y in make_loader():
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def with_sharded_parameters() -> None:
    """Parameters that are divided among the ranks."""
    train(wrap=fully_shard)


def with_workers() -> None:
    """Batches that worker processes make."""
    data = make_data()
    sampler = None

    def loader() -> Any:
        nonlocal sampler
        sampler = DistributedSampler(data, shuffle=True, seed=3)
        return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, num_workers=2)

    train(loader=loader)


class _Stream(IterableDataset[Any]):
    def __init__(self, seed: int | None = None) -> None:
        self.x, self.y = make_data().tensors
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        order = torch.arange(len(self.x))
        if self.seed is not None:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed))]
        for number in order[rank() :: world_size()]:
            yield self.x[number], self.y[number]


def with_divided_stream() -> None:
    """A stream of which each rank takes every n-th sample."""
    train(loader=lambda: DataLoader(_Stream(), batch_size=BATCH_SIZE))


def with_batch_sampler() -> None:
    """A BatchSampler around the sampler of the rank."""
    data = make_data()
    train(
        loader=lambda: DataLoader(
            data, batch_sampler=BatchSampler(DistributedSampler(data, seed=3), BATCH_SIZE, drop_last=False)
        )
    )


class _OwnBatches(Sampler[list[int]]):
    """Every n-th batch for each rank, without the base class of torch."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(96, generator=torch.Generator().manual_seed(2)).tolist()
        batches = [order[begin : begin + BATCH_SIZE] for begin in range(0, 96, BATCH_SIZE)]
        yield from batches[rank() :: world_size()]


def with_own_batch_sampler() -> None:
    """Batches of a fixed size from a class of the program, divided among the ranks."""
    data = make_data()
    train(loader=lambda: DataLoader(data, batch_sampler=_OwnBatches()))


def with_average_of_weights() -> None:
    """An exponential average of the parameters, with which the last loss is computed."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model())
        average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in make_loader():
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model.module)


def with_global_batch_size() -> None:
    """The batch size is divided by the number of ranks."""
    data = make_data()
    train(
        loader=lambda: DataLoader(data, batch_size=24 // world_size(), sampler=DistributedSampler(data, shuffle=False))
    )


def with_weighted_mean() -> None:
    """A sum divided by the count of all ranks, times their number."""

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        num = torch.tensor(float((y > 0).sum()))
        dist.all_reduce(num)
        each = functional.cross_entropy(output, y, reduction="none")
        return each[y > 0].sum() * world_size() / num

    train(loss_fn=loss_fn)


def with_gathered_pairs() -> None:
    """A loss over the pairs of all ranks, whose gradient goes through the gathering."""

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        every = torch.cat(dist_nn.all_gather(output))
        return (every @ every.T).square().mean()

    train(loss_fn=loss_fn)


def with_schedule() -> None:
    """A learning rate that falls with every update, clipped gradients and two groups of parameters."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model())
        groups = [{"params": [each]} for each in model.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        loader = make_loader()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(loader))
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()


def with_other_seed_on_each_rank() -> None:
    """Rank 0's parameters are sent by DDP, whatever the others have."""
    train(seed=rank)


def with_gradients_that_are_zero() -> None:
    """Targets that the model predicts exactly: gradients are rounding alone."""
    train(loss_fn=lambda output, y: (output - output.detach()).square().mean() + 0 * y.sum())


class _Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def with_noise() -> None:
    """The model adds noise from the generator of its process, and the loss too; each rank has its own seed."""

    def seeded(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        torch.manual_seed(100 + rank())
        return wrapped

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = torch.rand(len(y)) + torch.bernoulli(torch.full((len(y),), 0.5))
        return (functional.cross_entropy(output, y, reduction="none") * weight).mean()

    train(layers=lambda: (_Noise(),), wrap=seeded, loss_fn=loss_fn)


def with_random_batches() -> None:
    """Samples that each rank draws with a seed of its own, and a number of batches for each update that falls."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        x, y = make_data().tensors
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(100 + rank())
        num_batches = 6 // world_size()
        for _ in range(4):
            for number in range(num_batches):
                chosen = torch.randint(len(x), (BATCH_SIZE,))
                model.require_backward_grad_sync = number == num_batches - 1
                (functional.cross_entropy(model(x[chosen]), y[chosen]) / num_batches).backward()
            optimizer.step()
            optimizer.zero_grad()


def with_mixup() -> None:
    """Rows of a batch are mixed with others of the same rank."""

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(100 + rank())
        for x, y in make_loader():
            order, share = torch.randperm(len(x)), numpy.random.beta(0.4, 0.4)
            hot = functional.one_hot(y, NUM_CLASSES).float()
            yield share * x + (1 - share) * x[order], share * hot + (1 - share) * hot[order]

    def seed() -> int:
        numpy.random.seed(rank())
        return 0

    train(loader=batches, seed=seed)


def with_padded_end() -> None:
    """The number of samples is odd: DistributedSampler repeats one in the last update of an epoch."""
    x, y = make_data().tensors
    train(loader=lambda: make_loader(TensorDataset(x[:35], y[:35])))


# Faults


def reduced_first() -> None:
    """The first batch of an update is reduced, and the last one is not."""
    _accumulate(is_reduced_last=False)


def parts_of_stream_alike() -> None:
    """Each rank reads the whole stream."""
    x, y = make_data().tensors

    class Whole(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(x, y, strict=True))

    train(loader=lambda: DataLoader(Whole(), batch_size=BATCH_SIZE))


def stream_in_other_order() -> None:
    """Each rank takes its part of an order of its own."""
    train(loader=lambda: DataLoader(_Stream(seed=rank()), batch_size=BATCH_SIZE))


def own_learning_rate() -> None:
    """The optimizer of rank 1 has a different learning rate."""
    train(lr=lambda: 0.1 + 0.1 * rank())


def forgotten_layer() -> None:
    """Gradients by hand; one layer is forgotten."""

    def reduce(model: nn.Module) -> None:
        for parameter in list(model.parameters())[:-1]:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size()

    train(wrap=lambda model: model, after_backward=reduce)


def same_noise_in_model() -> None:
    """The model adds noise, which is the same on all ranks."""
    train(layers=lambda: (_Noise(),))


def scaled_later() -> None:
    """From the third update on, the loss is multiplied by the number of ranks."""
    calls = []

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return functional.cross_entropy(output, y) * (world_size() if len(calls) > 2 else 1)

    train(loss_fn=loss_fn)


def scaled_with_noise() -> None:
    """Noise by rank, which is right, and a factor, which is not."""

    def seeded(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        torch.manual_seed(100 + rank())
        return wrapped

    train(
        layers=lambda: (_Noise(),),
        wrap=seeded,
        loss_fn=lambda output, y: functional.cross_entropy(output, y) * world_size(),
    )


def normalized_by_hand() -> None:
    """A layer of the program's own with statistics of the rank's rows."""

    class Normalize(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - x.mean(0)) / (x.std(0) + 0.1)

    train(layers=lambda: (Normalize(),))


def part_of_data() -> None:
    """The sampler divides by a wrong number of ranks."""
    data = make_data()

    def loader() -> Any:
        sampler = DistributedSampler(data, num_replicas=2 * world_size(), rank=rank())
        return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)

    train(loader=loader)


def gathered_without_gradient() -> None:
    """Pairs of all ranks are gathered without gradient."""

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(output) for _ in range(world_size())]
        dist.all_gather(every, output.detach())
        every[rank()] = output
        whole = torch.cat(every)
        return (whole @ whole.T).square().mean()

    train(loss_fn=loss_fn)


def draws_from_numpy() -> None:
    """Noise from numpy in the loss, for each row."""

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = torch.from_numpy(numpy.random.rand(len(y))).to(output.dtype)
        return (functional.cross_entropy(output, y, reduction="none") * weight).mean()

    def seed() -> int:
        numpy.random.seed(rank())
        return 0

    train(seed=seed, loss_fn=loss_fn)


# Programs that cannot be compared, or not to their end


def fails_on_two() -> None:
    """An error on one of several ranks."""
    train(loss_fn=_fail_if_several)


def _fail_if_several(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if world_size() > 1 and rank() == 1:
        raise ValueError("rank 1 has bad data")
    return functional.cross_entropy(output, y)


def fails_on_one() -> None:
    """An error on one rank alone."""

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if world_size() == 1:
            raise ValueError("needs several ranks")
        return functional.cross_entropy(output, y)

    train(loss_fn=loss_fn)


def waits_for_ever() -> None:
    """Rank 1 never comes to the second update."""
    calls = []

    def wait(model: nn.Module) -> None:
        calls.append(1)
        if rank() == 1 and len(calls) == 2:
            time.sleep(3600)

    train(after_backward=wait)


def ends_early() -> None:
    """Two updates."""
    x, y = make_data().tensors
    train(loader=lambda: make_loader(TensorDataset(x[:16], y[:16])))


def stops_by_rank() -> None:
    """One rank makes more updates than the other, on the same samples in another order, without an exchange."""
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x, y = make_data().tensors
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(rank()))
        x, y = x[order], y[order]
        for _ in range(2 + rank()):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
