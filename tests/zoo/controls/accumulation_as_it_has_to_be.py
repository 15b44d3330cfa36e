# SPDX-License-Identifier: Apache-2.0
"""Accumulation in which each backward has to be reduced: with a static graph, and where each one's mean is read."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
models = [DDP(torch.nn.Linear(8, 8), static_graph=True), DDP(torch.nn.Linear(8, 8))]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
torch.manual_seed(1 + rank)
noise = []
for _ in range(12):
    for _ in range(2):
        (models[0](torch.randn(32, 8)).square().mean() / 2).backward()
    for _ in range(2):
        (models[1](torch.randn(32, 8)).square().mean() / 2).backward()
        noise.append(models[1].module.weight.grad.square().sum())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
