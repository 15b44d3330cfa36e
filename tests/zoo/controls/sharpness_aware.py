# SPDX-License-Identifier: Apache-2.0
"""Sharpness-aware steps: each rank climbs on its own data, and all descend together."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
torch.manual_seed(1 + rank)
for step in range(30):
    batch = torch.randn(8, 6)
    with model.no_sync():
        model(batch).square().mean().backward()
    climbs = [0.05 * parameter.grad / parameter.grad.norm() for parameter in model.parameters()]
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, climb in zip(model.parameters(), climbs, strict=True):
            parameter += climb
    model(batch).square().mean().backward()
    with torch.no_grad():
        for parameter, climb in zip(model.parameters(), climbs, strict=True):
            parameter -= climb
            dist.broadcast(parameter, 0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
