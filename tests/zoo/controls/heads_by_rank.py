# SPDX-License-Identifier: Apache-2.0
"""find_unused_parameters with another head on each rank."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Two(torch.nn.Module):
    """Two heads, of which one is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return self.a(x) if first else self.b(x)


model = DDP(Two(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(12):
    model(torch.randn(32, 4), first=(step + rank) % 2 == 0).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
