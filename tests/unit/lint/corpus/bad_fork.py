# SPDX-License-Identifier: Apache-2.0
import multiprocessing
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as tmp


def rank_main(rank, size):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    dist.barrier()
    dist.destroy_process_group()


def launch_processes(size):
    scale = torch.ones(3, device="cuda")
    ctx = tmp.get_context("fork")
    children = [ctx.Process(target=rank_main, args=(r, size)) for r in range(size)]  # expect: DDP114
    for c in children:
        c.start()
    for c in children:
        c.join()
    return scale


def launch_forced(size):
    torch.cuda.init()
    multiprocessing.set_start_method("fork", force=True)
    ps = []
    for r in range(size):
        p = multiprocessing.Process(target=rank_main, args=(r, size))  # expect: DDP114
        p.start()
        ps.append(p)
    [p.join() for p in ps]


if __name__ == "__main__":
    launch_processes(2)
    launch_forced(2)
