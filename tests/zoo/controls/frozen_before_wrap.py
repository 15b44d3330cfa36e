# SPDX-License-Identifier: Apache-2.0
"""Part of the model is frozen, before it is wrapped."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inner = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
inner[0].requires_grad_(False)
model = DDP(inner)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
torch.manual_seed(1 + rank)
for step in range(12):
    model(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
