# SPDX-License-Identifier: Apache-2.0
"""All ranks stop together."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def should_stop(loss, rank):
    stop = torch.zeros(1)
    if rank == 0 and loss.item() < 1e-3:
        stop += 1
    dist.broadcast(stop, src=0)
    return bool(stop.item())


def run(dataset, model, optimizer, epochs=5):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 16, sampler=sampler)
    model = DDP(model)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = ((model(x) - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if should_stop(loss, rank):
            break
    if rank != 0:
        dist.destroy_process_group()
        return None
    torch.save(model.module.state_dict(), "last.pt")
    dist.destroy_process_group()
    return model
