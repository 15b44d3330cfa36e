# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: collectives that only members call."""

import os

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    half = size // 2
    first = dist.new_group(list(range(half)))
    second = dist.new_group(list(range(half, size)))
    x = torch.ones(4, device="cuda") * rank
    if rank < half:
        dist.all_reduce(x, group=first)
    else:
        dist.all_reduce(x, group=second)
    if rank == 0:
        dist.send(x, dst=half)
    elif rank == half:
        dist.recv(x, src=0)
    gathered = [torch.zeros_like(x) for _ in range(size)] if rank == 0 else None
    dist.gather(x, gathered, dst=0)
    if rank == 0:
        dist.broadcast_object_list([gathered], src=0)
    else:
        received = [None]
        dist.broadcast_object_list(received, src=0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
