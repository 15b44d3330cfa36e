# SPDX-License-Identifier: Apache-2.0
"""A barrier inside `if rank == 0`, as for saving: the other rank is in backward already."""

# without: hang
# finding: DDP201, rank 0

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step == 3:
        dist.barrier()  # HERE
dist.destroy_process_group()
