# SPDX-License-Identifier: Apache-2.0
"""LBFGS, whose closure is called many times, on a loss that all ranks have."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(6, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")
data = torch.randn(64, 6, generator=torch.Generator().manual_seed(rank + 1))
target = data.sum(1, keepdim=True)


def closure():
    """What the step calls."""
    optimizer.zero_grad()
    loss = (model(data) - target).square().mean()
    loss.backward()
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return whole / dist.get_world_size()


for step in range(12):
    optimizer.step(closure)
dist.destroy_process_group()
