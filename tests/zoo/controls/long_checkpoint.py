# SPDX-License-Identifier: Apache-2.0
"""Rank 0 writes a checkpoint for six seconds, and the other waits at a barrier."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(5):
    model(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    with tempfile.TemporaryDirectory() as folder:
        for part in range(12):
            torch.save(model.module.state_dict(), os.path.join(folder, f"part{part}.pt"))
            time.sleep(0.5)
dist.barrier()
for step in range(5):
    model(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
