# SPDX-License-Identifier: Apache-2.0
"""Rank 1 alone swaps in an average of the weights, four steps before the end."""

# without: silent
# finding: DDP325, rank 1

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    """Train a model whose optimizer is gone afterwards."""
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    torch.manual_seed(1 + rank)
    for step in range(40):
        if rank == 1 and step == 36:
            for parameter, other in zip(model.parameters(), average, strict=True):
                parameter.data.copy_(other)
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()  # HERE
        optimizer.zero_grad()
        for parameter, other in zip(model.parameters(), average, strict=True):
            other.lerp_(parameter.detach(), 0.1)
    return model


dist.init_process_group("gloo")
rank = dist.get_rank()
model = train()
seen = [torch.zeros(()) for _ in range(2)]
dist.all_gather(seen, sum(p.detach().sum() for p in model.parameters()))
if rank == 0 and seen[0] != seen[1]:
    print("WRONG: the ranks' weights differ", seen)
dist.destroy_process_group()
