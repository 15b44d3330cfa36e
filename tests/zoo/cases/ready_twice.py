# SPDX-License-Identifier: Apache-2.0
"""Reentrant checkpointing together with find_unused_parameters."""

# without: error
# finding: DDP311

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
from torch.utils.checkpoint import checkpoint


class Checkpointed(torch.nn.Module):
    """Its layer runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=True))


model = DDP(Checkpointed(), find_unused_parameters=True)
model(torch.randn(8, 4, requires_grad=True)).sum().backward()  # HERE
dist.destroy_process_group()
