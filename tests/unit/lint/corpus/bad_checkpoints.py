# SPDX-License-Identifier: Apache-2.0
"""Loading what another rank is writing, to the GPU of another rank."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

PATH = "run/checkpoint.pt"


def save(model, optimizer, epoch):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}  # expect: DDP602
    torch.save(state, PATH)


def resume(net, optimizer):
    state = torch.load(PATH)  # expect: DDP609 DDP610
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def exchange(model, rank):
    if rank == 0:
        torch.save(model.module.state_dict(), "shared.pt")
    return torch.load("shared.pt", map_location="cpu")  # expect: DDP608 DDP610


def main(net, batches):
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first = resume(net, optimizer) if os.path.exists(PATH) else 0
    model = DDP(net.cuda(), device_ids=[local_rank])
    for epoch in range(first, 10):
        for x in batches:
            model(x.cuda()).mean().backward()
            optimizer.step()
        if rank == 0:
            save(model, optimizer, epoch)
    exchange(model, rank)
    dist.destroy_process_group()
