# SPDX-License-Identifier: Apache-2.0
import os
import concurrent.futures as cf
import multiprocessing as mp
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def job(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.barrier()
    dist.destroy_process_group()


def by_os_fork():
    net = torch.nn.Linear(2, 2).cuda()
    pid = os.fork()  # expect: DDP114
    job(0 if pid else 1)
    return net


def by_pool():
    torch.cuda.synchronize()
    with mp.get_context("fork").Pool(2) as pool:  # expect: DDP114
        pool.map(job, range(2))


def by_executor():
    x = torch.zeros(3).to("cuda")
    with cf.ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as pool:  # expect: DDP114
        list(pool.map(job, range(2)))
    return x


def by_elastic():
    torch.cuda.empty_cache()
    y = torch.randn(3, device="cuda")
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="fork")
    elastic_launch(config, job)(0)  # expect: DDP114
    return y


if __name__ == "__main__":
    by_os_fork()
