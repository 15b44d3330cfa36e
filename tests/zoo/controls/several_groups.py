# SPDX-License-Identifier: Apache-2.0
"""Groups of both ranks and of each rank alone."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
both, first, second = dist.new_group([0, 1]), dist.new_group([0]), dist.new_group([1])
for step in range(10):
    model(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    mine = torch.ones(3 + rank)
    dist.all_reduce(mine, group=first if rank == 0 else second)
    dist.all_reduce(torch.ones(2), group=both)
dist.destroy_process_group()
