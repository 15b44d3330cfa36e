# SPDX-License-Identifier: Apache-2.0
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, size, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size, init_method=f"file://{path}")
    torch.manual_seed(rank)
    try:
        x = torch.randn(3, device="cuda")
        dist.all_reduce(x)
    finally:
        dist.destroy_process_group()


def start(size):
    ctx = mp.get_context("spawn")
    y = torch.ones(1).cuda()
    ps = [ctx.Process(target=worker, args=(r, size, "/tmp/f")) for r in range(size)]
    for p in ps:
        p.start()
    for p in ps:
        p.join()
    return y


def count():
    if os.fork() == 0:
        os._exit(torch.cuda.device_count())


if __name__ == "__main__":
    mp.set_start_method("spawn")
    start(2)
