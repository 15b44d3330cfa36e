# SPDX-License-Identifier: Apache-2.0
"""Saved on rank 0, loaded after a barrier to each rank's own device."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

PATH = "run/checkpoint.pt"


def unwrap(model):
    return model.module if hasattr(model, "module") else model


def save(model, optimizer, epoch):
    if dist.get_rank() == 0:
        state = {"model": unwrap(model).state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, PATH + ".tmp")
        os.replace(PATH + ".tmp", PATH)
    dist.barrier()


def resume(model, optimizer, local_rank):
    state = torch.load(PATH, map_location=f"cuda:{local_rank}", weights_only=True)
    unwrap(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def main(net, batches):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(net.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = resume(model, optimizer, local_rank) if os.path.exists(PATH) else 0
    for epoch in range(first, 10):
        for x in batches:
            model(x.cuda()).mean().backward()
            optimizer.step()
        save(model, optimizer, epoch)
    dist.destroy_process_group()
