# SPDX-License-Identifier: Apache-2.0
"""An exponential average of the weights, swapped in on all ranks to evaluate, and out again."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
average = [parameter.detach().clone() for parameter in model.parameters()]
torch.manual_seed(1 + rank)


def swap():
    """Change places with the average."""
    for parameter, other in zip(model.parameters(), average, strict=True):
        kept = parameter.data.clone()
        parameter.data.copy_(other)
        other.copy_(kept)


for step in range(40):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for parameter, other in zip(model.parameters(), average, strict=True):
        other.lerp_(parameter.detach(), 0.1)
    if step % 10 == 9:
        swap()
        model.eval()
        with torch.no_grad():
            sums = torch.tensor([model.module(torch.randn(8, 4)).square().sum(), 8])
        dist.all_reduce(sums)
        model.train()
        swap()
if rank == 0:
    swap()
dist.barrier()
dist.destroy_process_group()
