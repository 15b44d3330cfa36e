# SPDX-License-Identifier: Apache-2.0
"""Four micro-batches are accumulated, and gradients are exchanged after each of them."""

# without: ok
# finding: DDP505

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for number in range(48):
    loss = model(torch.randn(8, 4)).square().mean() / 4
    loss.backward()  # HERE
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
