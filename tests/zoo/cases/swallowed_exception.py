# SPDX-License-Identifier: Apache-2.0
"""A bad sample is skipped on one rank: its backward never comes."""

# without: hang
# finding: DDP210, rank 1

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(6):
    try:
        if rank == 1 and step == 3:
            raise ValueError("bad sample")
        model(torch.randn(8, 4)).square().mean().backward()
    except ValueError:  # HERE
        continue
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
