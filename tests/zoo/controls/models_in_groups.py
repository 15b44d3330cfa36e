# SPDX-License-Identifier: Apache-2.0
"""One model over both ranks, and one in a group of each rank's own, trained in turn."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
groups = [dist.new_group([number]) for number in range(2)]
shared = DDP(torch.nn.Linear(4, 4))
own = DDP(torch.nn.Linear(4, 2), process_group=groups[rank])
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (shared, own)]
torch.manual_seed(1 + rank)
for step in range(25):
    own(shared(torch.randn(8, 4))).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
