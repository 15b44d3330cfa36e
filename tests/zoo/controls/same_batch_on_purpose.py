# SPDX-License-Identifier: Apache-2.0
"""Rank 0 reads the data and broadcasts it, as for a model that is split among the ranks."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
half = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(12):
    x = torch.randn(32, 4) if rank == 0 else torch.empty(32, 4)
    dist.broadcast(x, src=0)
    y = half(x)
    both = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(both, y.detach())
    (y - both[1 - rank]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
