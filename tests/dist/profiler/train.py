# SPDX-License-Identifier: Apache-2.0
"""A training script with one planted cost, named by its first word."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

COST_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
BATCH_SIZE = 8


def pay(name: str, rank: int | None = None) -> None:
    """Sleep if `name` is the planted cost, on `rank` or on all."""
    if sys.argv[1] == name and rank in (None, dist.get_rank()):
        time.sleep(COST_S)


class Samples(Dataset[Any]):
    """Random samples; the first of each batch takes the time."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        if self.count % BATCH_SIZE == 0:
            pay("loader")
            pay("loader of rank 1", 1)
        self.count += 1
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator), index % 2

    count = 0


class Net(nn.Module):
    """A small model that may be slow on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))

    def forward(self, x: torch.Tensor) -> Any:
        """Sleep as planted."""
        pay("forward of rank 1", 1)
        pay("forward")
        return self.layers(x)


def main() -> None:
    """Train for 25 updates on each of two ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Samples()
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    for update, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if sys.argv[1] == "logging":
            for _ in range(60):
                dist.all_reduce(loss.detach())  # THE LINE
        if sys.argv[1] == "code of rank 1":
            pay("code of rank 1", 1)
        if update == 20 and sys.argv[1] == "error":
            raise ValueError("planted")
        if update == 20 and sys.argv[1] == "interrupt":
            print("update 20", flush=True)
            time.sleep(60)
    print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


main()
