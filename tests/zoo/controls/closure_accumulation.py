# SPDX-License-Identifier: Apache-2.0
"""Micro-batches in no_sync, and the last one in the closure of the step."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
torch.manual_seed(1 + rank)


def closure():
    """What the step calls."""
    loss = model(torch.randn(8, 6)).square().mean() / 2
    loss.backward()
    return loss


for step in range(30):
    with model.no_sync():
        (model(torch.randn(8, 6)).square().mean() / 2).backward()
    optimizer.step(closure)
    optimizer.zero_grad()
dist.destroy_process_group()
