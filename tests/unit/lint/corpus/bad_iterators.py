# SPDX-License-Identifier: Apache-2.0
"""Steps from an endless iterator; loaders in a dictionary; a compiled wrapper that is saved."""

import functools
import itertools
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

ddp = functools.partial(DistributedDataParallel, broadcast_buffers=False)


def build_loaders(train_set, valid_set):
    make = functools.partial(DataLoader, num_workers=2)
    return {
        "train": DataLoader(train_set, batch_size=16, shuffle=True),  # expect: DDP401
        "valid": make(valid_set, batch_size=16),
    }


def infinite(loader):
    while True:
        yield from loader


def main(train_set, valid_set, net, num_steps):
    dist.init_process_group("gloo")
    loaders = build_loaders(train_set, valid_set)
    model = torch.compile(ddp(net))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batches = iter(loaders["train"])
    for step in range(num_steps):
        x = next(batches)
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if not dist.get_rank():
        torch.save(model.state_dict(), os.path.join("out", "model.pt"))  # expect: DDP602
    dist.destroy_process_group()
    return itertools.chain(loaders["valid"])
