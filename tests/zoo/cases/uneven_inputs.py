# SPDX-License-Identifier: Apache-2.0
"""One rank has one batch more than the other, which continues to the end of its epoch."""

# without: SIGABRT or hang or error
# finding: DDP207

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
batches = [torch.randn(8, 4) for _ in range(5 if rank == 0 else 4)]
for x in batches:
    model(x).square().mean().backward()  # HERE
    optimizer.step()
    optimizer.zero_grad()
total = torch.zeros(1)
dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
