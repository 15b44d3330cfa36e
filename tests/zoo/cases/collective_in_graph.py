# SPDX-License-Identifier: Apache-2.0
"""A loss is reduced before backward."""

# without: ok
# finding: DDP410

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(5):
    loss = model(torch.randn(8, 4)).square().mean()
    dist.all_reduce(loss)  # HERE
    (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
