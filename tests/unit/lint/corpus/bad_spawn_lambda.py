# SPDX-License-Identifier: Apache-2.0
"""Spawned without a main guard, and a lambda among the arguments."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world_size, make):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = torch.nn.parallel.DistributedDataParallel(make())
    model(torch.randn(2, 4)).sum().backward()
    dist.destroy_process_group()


mp.spawn(worker, args=(2, lambda: torch.nn.Linear(4, 1)), nprocs=2)  # expect: DDP111 DDP113
