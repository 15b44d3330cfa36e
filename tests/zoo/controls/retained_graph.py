# SPDX-License-Identifier: Apache-2.0
"""Two losses of one forward, summed and by two backwards under no_sync."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(8):
    y = model(torch.randn(32, 4))
    (y.square().mean() + y.abs().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
