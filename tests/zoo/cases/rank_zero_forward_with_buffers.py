# SPDX-License-Identifier: Apache-2.0
"""Rank 0 validates through the wrapper, whose forward broadcasts BatchNorm's buffers."""

# without: SIGABRT or hang or error
# finding: DDP211, rank 0

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for epoch in range(2):
    for step in range(3):
        model(torch.randn(32, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randn(32, 4))  # HERE
        model.train()
dist.destroy_process_group()
