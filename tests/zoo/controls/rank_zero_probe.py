# SPDX-License-Identifier: Apache-2.0
"""Rank 0 alone trains a small probe with an optimizer of its own."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
probe = torch.nn.Linear(8, 3)
probe_optimizer = torch.optim.Adam(probe.parameters())
for step in range(12):
    x = torch.randn(32, 4)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        features = model.module[0](x).detach()
        probe(features).square().mean().backward()
        probe_optimizer.step()
        probe_optimizer.zero_grad()
dist.destroy_process_group()
