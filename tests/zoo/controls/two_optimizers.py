# SPDX-License-Identifier: Apache-2.0
"""Two optimizers for the parts of one model."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizers = [torch.optim.SGD(model.module[0].parameters(), lr=0.1), torch.optim.Adam(model.module[2].parameters())]
torch.manual_seed(1 + rank)
for step in range(12):
    model(torch.randn(32, 4)).square().mean().backward()
    for optimizer in optimizers[: 1 + step % 2]:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
dist.destroy_process_group()
