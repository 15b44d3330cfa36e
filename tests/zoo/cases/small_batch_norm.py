# SPDX-License-Identifier: Apache-2.0
"""BatchNorm with four samples per rank."""

# without: ok
# finding: DDP408

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(10):
    model(torch.randn(4, 4)).square().mean().backward()  # HERE
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
