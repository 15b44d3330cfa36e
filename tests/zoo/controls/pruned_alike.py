# SPDX-License-Identifier: Apache-2.0
"""Weights are masked by their size on all ranks alike, and stay so."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
mask = None
for step in range(30):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 10:
        weight = model.module.weight.detach()
        mask = weight.abs() > weight.abs().median()
    if mask is not None:
        model.module.weight.data *= mask
dist.destroy_process_group()
