# SPDX-License-Identifier: Apache-2.0
import os
from functools import partial
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing import spawn


def run_all(size, make_model):
    def inner(rank, n):
        dist.init_process_group("gloo", rank=rank, world_size=n)
        dist.barrier()
        dist.destroy_process_group()

    go = lambda r: inner(r, size)
    spawn(inner, args=(size,), nprocs=size)  # expect: DDP113
    spawn(go, nprocs=size)  # expect: DDP113
    spawn(partial(inner, n=size), nprocs=size)  # expect: DDP113


def solo(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.barrier()
    dist.destroy_process_group()


os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = "12355"
procs = []
for r in range(2):
    p = mp.get_context("spawn").Process(target=solo, args=(r,))  # expect: DDP111
    p.start()
    procs.append(p)
