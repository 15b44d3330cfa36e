# SPDX-License-Identifier: Apache-2.0
"""A frozen teacher on each rank, and a wrapped student that learns from it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
teacher = torch.nn.Linear(4, 2).eval().requires_grad_(False)
student = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
for step in range(25):
    x = torch.randn(8, 4)
    (student(x) - teacher(x)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
