# SPDX-License-Identifier: Apache-2.0
"""Batches chosen by hand for each rank, averaging by hand, and checks that only rank 0 makes."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler


class RankSampler(Sampler):
    def __init__(self, length, rank, world_size):
        self.length, self.rank, self.world_size = length, rank, world_size

    def __iter__(self):
        return iter(range(self.rank, self.length, self.world_size))

    def __len__(self):
        return self.length // self.world_size


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size, dataset, model):
    torch.manual_seed(1234)
    loader = DataLoader(dataset, batch_size=128 // size, sampler=RankSampler(len(dataset), rank, size))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for data, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(ddp(data), target)
        loss.backward()
        average_gradients(model)
        optimizer.step()
    if rank == 0:
        with torch.no_grad():
            ddp.module(torch.zeros(1, 784))
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), [], torch.nn.Linear(784, 10))
    dist.destroy_process_group()
