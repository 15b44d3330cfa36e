# SPDX-License-Identifier: Apache-2.0
"""Rank 0 evaluates the inner model, and the others wait."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for epoch in range(3):
    for step in range(4):
        model(torch.randn(64, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            for batch in range(5):
                model.module(torch.randn(64, 4))
                time.sleep(0.2)
        model.train()
    dist.barrier()
dist.destroy_process_group()
