# SPDX-License-Identifier: Apache-2.0
"""Each rank decides for itself when to stop."""

import math
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def run(dataset, model, optimizer, epochs=5):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    sampler = DistributedSampler(dataset, seed=7)
    loader = DataLoader(dataset, 16, sampler=sampler)
    model = DDP(model)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = ((model(x) - y) ** 2).mean()
            if math.isnan(loss.item()):
                break  # expect: DDP210
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and i > 50:
                break
            flag = torch.zeros(1)
            dist.all_reduce(flag)  # expect: DDP208
    dist.destroy_process_group()
