# SPDX-License-Identifier: Apache-2.0
"""An exponential average of the weights, on rank 0 alone."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
average = torch.optim.swa_utils.AveragedModel(model.module) if rank == 0 else None
for step in range(12):
    model(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if average is not None:
        average.update_parameters(model.module)
dist.destroy_process_group()
