# SPDX-License-Identifier: Apache-2.0
"""Sums and counts are reduced, and a loss is reported from rank 0."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(10):
    loss = model(torch.randn(32, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = torch.stack([loss.detach() * 32, torch.tensor(32.0)])
    dist.all_reduce(total)
    if rank == 0:
        print("loss", (total[0] / total[1]).item(), "of rank 0 alone", loss.item())
dist.destroy_process_group()
