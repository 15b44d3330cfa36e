# SPDX-License-Identifier: Apache-2.0
"""Training programs with one planted cause each, and good ones; the first word names the program.

`benchmarks.profile_causes` profiles them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset

import ddpilot

WIDTH, BATCH, NUM_UPDATES = 256, 512, 40
Parameters = Any


def make_net(width: int = WIDTH, depth: int = 5) -> nn.Module:
    """A network whose forward and backward pass take about 30 ms on one core."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Slow(nn.Module):
    """A module that computes more on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net = make_net()
        self.num_times = 4 if dist.get_rank() == rank else 1

    def forward(self, x: torch.Tensor) -> Any:
        """The output of `net`, computed as often as planted."""
        return torch.stack([self.net(x) for _ in range(self.num_times)]).mean(0)


class Samples(Dataset[Any]):
    """Random samples. Each may take time, on one rank or on all."""

    def __init__(self, num: int, sleep_s: float = 0.0, rank: int | None = None, width: int = WIDTH) -> None:
        self.x = torch.randn(64, width)
        self.num = num
        self.sleep_s = sleep_s if rank in (None, dist.get_rank()) else 0.0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return self.x[index % 64], index % 10


def make_loader(data: Dataset[Any], batch_size: int = BATCH) -> DataLoader[Any]:
    """A loader of the samples of this rank."""
    return DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))


def num_samples(batch_size: int = BATCH, num_updates: int = NUM_UPDATES) -> int:
    """Samples of both ranks."""
    return batch_size * num_updates * 2


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(
    model: nn.Module, loader: DataLoader[Any], after: Callable[[torch.Tensor, int], object] | None = None
) -> None:
    """Train for one epoch, and call `after` with the loss and the number of each update."""
    optimizer = make_sgd(model)
    for number, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if after is not None:
            after(loss, number)


def slow_loader() -> None:
    """Each batch takes 25 ms to load on all ranks."""
    train(DistributedDataParallel(make_net()), make_loader(Samples(num_samples(), 25e-3 / BATCH)))


def slow_loader_of_rank() -> None:
    """Each batch takes longer to load on rank 1."""
    train(DistributedDataParallel(make_net()), make_loader(Samples(num_samples(), 25e-3 / BATCH, 1)))


def slow_rank() -> None:
    """Rank 1 computes four times as much for equal batches."""
    train(DistributedDataParallel(Slow(1)), make_loader(Samples(num_samples())))


def item_each_step() -> None:
    """The loss is read in each update, on a device that is emulated: it computes in a thread of its own."""
    device = torch.device("emu", int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    model = DistributedDataParallel(make_net(width=128, depth=40).to(device), device_ids=[device.index])
    optimizer = make_sgd(model)
    x, y = torch.randn(256, 128, device=device), torch.randint(10, (256,), device=device)
    total = 0.0
    for _ in range(NUM_UPDATES):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.item()
    print(f"mean loss {total / NUM_UPDATES:.3f}")


def needless_search() -> None:
    """DDP looks for unused parameters in a large graph, and there are none."""
    net = make_net(width=16, depth=800)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    train(model, make_loader(Samples(num_samples(64), width=16), 64))


def tiny_buckets() -> None:
    """Each bucket has one parameter."""
    model = DistributedDataParallel(make_net(width=64, depth=150), bucket_cap_mb=0.001)
    train(model, make_loader(Samples(num_samples(), width=64)))


def small_batch() -> None:
    """Two samples of a small model for each exchange of gradients."""
    model = DistributedDataParallel(make_net(width=32, depth=2))
    train(model, make_loader(Samples(num_samples(2, 300), width=32), 2))


def too_many_threads() -> None:
    """Eight threads on each rank."""
    torch.set_num_threads(8)
    train(DistributedDataParallel(make_net()), make_loader(Samples(num_samples())))


def checkpoint_each_step() -> None:
    """Rank 0 saves the state in each update."""
    model = DistributedDataParallel(make_net())
    large = torch.zeros(4_000_000)
    with tempfile.TemporaryDirectory() as folder:

        def save(_: torch.Tensor, number: int) -> None:
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "ema": large, "update": number}, Path(folder) / "last.pt")

        train(model, make_loader(Samples(num_samples())), save)


def heavy_logging() -> None:
    """A large tensor of statistics is reduced in each update."""
    statistics = torch.zeros(8_000_000)

    def log(_loss: torch.Tensor, _number: int) -> None:
        dist.all_reduce(statistics)

    train(DistributedDataParallel(make_net()), make_loader(Samples(num_samples())), log)


class Lengths(Sampler[list[int]]):
    """Batches of samples of one length each, in random order: the same lengths on all ranks, or not."""

    def __init__(self, is_shared: bool) -> None:
        self.seed = 0 if is_shared else dist.get_rank()

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        for number in range(NUM_UPDATES):
            length = int(torch.randint(1, 9, (1,), generator=generator))
            first = (NUM_UPDATES * dist.get_rank() + number) * BATCH // 2
            yield [10 * (first + sample) + length for sample in range(BATCH // 2)]

    def __len__(self) -> int:
        return NUM_UPDATES


class Sequences(Dataset[Any]):
    """Sequences whose length is the last digit of their index."""

    def __init__(self) -> None:
        self.x = torch.randn(100_000)

    def __getitem__(self, index: int) -> Any:
        place = index // 10
        return self.x[place : place + index % 10 * WIDTH].reshape(-1, WIDTH)


def uneven_lengths() -> None:
    """The ranks have batches of sequences of different lengths."""
    model = DistributedDataParallel(make_net())
    optimizer = make_sgd(model)
    for x in DataLoader(Sequences(), batch_sampler=Lengths(is_shared=False)):
        loss = model(x).logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def slow_link() -> None:
    """An exchange of gradients takes 40 ms longer than the link of this machine needs."""
    model = DistributedDataParallel(make_net())

    def exchange(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        work: Any = dist.all_reduce(bucket.buffer().div_(2), async_op=True)

        def delayed(future: torch.futures.Future[Any]) -> torch.Tensor:
            time.sleep(0.04)
            return future.value()[0]  # type: ignore[no-any-return]

        return work.get_future().then(delayed)  # type: ignore[no-any-return]

    exchange.__annotations__.clear()  # torch refuses those that are text
    model.register_comm_hook(None, exchange)
    train(model, make_loader(Samples(num_samples())))


def good_ddp() -> None:
    """A loop as in torch's tutorials; the loss is shown now and then."""

    def show(loss: torch.Tensor, number: int) -> None:
        if number % 20 == 0 and dist.get_rank() == 0:
            print(f"{number}: {loss.item():.3f}")

    train(DistributedDataParallel(make_net()), make_loader(Samples(num_samples())), show)


def good_loop() -> None:
    """The same with `ddpilot.Loop`."""
    loop = ddpilot.Loop(seed=0, progress=False)
    model = make_net()
    model, optimizer = loop.prepare(model, make_sgd(model))
    data = TensorDataset(torch.randn(num_samples(), WIDTH), torch.randint(10, (num_samples(),)))
    for x, y in loop.batches(loop.loader(data, global_batch_size=2 * BATCH)):
        with loop.accumulate(model):
            loop.backward(nn.functional.cross_entropy(model(x), y))
        loop.step(optimizer)


def good_trainer() -> None:
    """The same with `ddpilot.Trainer`."""
    data = TensorDataset(torch.randn(num_samples(), WIDTH), torch.randint(10, (num_samples(),)))
    trainer = ddpilot.Trainer(make_net(), nn.functional.cross_entropy, lambda ps: torch.optim.SGD(ps, lr=0.01))
    trainer.fit(data, epochs=1, global_batch_size=2 * BATCH)


def good_accumulation() -> None:
    """Gradients of four batches are added up, and exchanged once."""
    model = DistributedDataParallel(make_net())
    optimizer = make_sgd(model)
    loader = make_loader(Samples(num_samples(BATCH // 4, 4 * NUM_UPDATES)), BATCH // 4)
    for number, (x, y) in enumerate(loader):
        is_last = number % 4 == 3
        model.require_backward_grad_sync = is_last
        (nn.functional.cross_entropy(model(x), y) / 4).backward()  # type: ignore[no-untyped-call]
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def good_lengths() -> None:
    """Sequences of different lengths, divided so that all ranks have equal ones."""
    model = DistributedDataParallel(make_net())
    optimizer = make_sgd(model)
    for x in DataLoader(Sequences(), batch_sampler=Lengths(is_shared=True)):
        loss = model(x).logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def good_evaluation() -> None:
    """The model is evaluated every 10 updates, on all ranks."""
    model = DistributedDataParallel(make_net())
    held_out = torch.randn(BATCH, WIDTH)

    def evaluate(_: torch.Tensor, number: int) -> None:
        if number % 10 == 9:
            model.eval()
            with torch.no_grad():
                error = model.module(held_out).square().mean()
            dist.all_reduce(error)
            model.train()  # type: ignore[no-untyped-call]

    train(model, make_loader(Samples(num_samples())), evaluate)


def main() -> None:
    """Run the program that the first word names."""
    name = sys.argv[1]
    torch.manual_seed(0)
    if name not in ("good_loop", "good_trainer"):
        dist.init_process_group("cpu:gloo,emu:eccl" if name == "item_each_step" else "gloo")
    if name != "too_many_threads":
        torch.set_num_threads(1)
    globals()[name]()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
