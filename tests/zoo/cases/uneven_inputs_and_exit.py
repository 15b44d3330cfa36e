# SPDX-License-Identifier: Apache-2.0
"""One rank has a batch more; the other has ended."""

# without: error
# finding: DDP207, rank 1

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(5 if rank == 0 else 4):
    model(torch.randn(8, 4)).square().mean().backward()  # HERE
    optimizer.step()
    optimizer.zero_grad()
