# SPDX-License-Identifier: Apache-2.0
"""A branch that depends on the data leaves a head out on one rank.

Its next forward pass raises, for which DDP308 names the parameters; DDP212 compares with rank 0, once that is there.
"""

# without: error
# finding: DDP212 or DDP308, rank 1

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


model = DDP(Two())
for step in range(3):
    model(torch.randn(8, 4), both=rank == 0 or step != 1).sum().backward()  # HERE
dist.destroy_process_group()
