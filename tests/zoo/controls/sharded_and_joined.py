# SPDX-License-Identifier: Apache-2.0
"""ZeroRedundancyOptimizer within Join: one rank has three batches more."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
torch.manual_seed(1 + rank)
for epoch in range(3):
    with Join([model, optimizer]):
        for step in range(8 + 3 * rank):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
