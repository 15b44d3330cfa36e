# SPDX-License-Identifier: Apache-2.0
"""find_unused_parameters without need."""

# without: ok
# finding: DDP502

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Two(torch.nn.Module):
    """Two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        x = self.body(x)
        return self.a(x) + self.b(x) if both else self.a(x)


model = DDP(Two(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(12):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
