# SPDX-License-Identifier: Apache-2.0
import os
import torch
import torch.distributed as dist
from multiprocessing import Process, get_context, set_start_method

net = torch.nn.Linear(4, 4).cuda()


def child(rank, size, fn):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    fn(rank, size)
    dist.destroy_process_group()


def job(rank, size):
    t = torch.zeros(1)
    if rank == 0:
        t += 1
        dist.broadcast(t, src=rank)
    else:
        dist.broadcast(t, 0)


if __name__ == "__main__":
    size = 2
    set_start_method("fork")
    ps = []
    for rank in range(size):
        p = Process(target=child, args=(rank, size, job))  # expect: DDP114
        p.start()
        ps.append(p)
    for p in ps:
        p.join()
