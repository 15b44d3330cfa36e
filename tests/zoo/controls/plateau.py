# SPDX-License-Identifier: Apache-2.0
"""A schedule that goes by a validation loss which all ranks reduce, and stops all of them."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
torch.manual_seed(1 + rank)
best, bad = float("inf"), 0
for epoch in range(12):
    for _ in range(4):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        x = torch.randn(5 + rank, 4)
        sums = torch.tensor([model.module(x).square().sum(), len(x)])
    model.train()
    dist.all_reduce(sums)
    loss = (sums[0] / sums[1]).item()
    schedule.step(loss)
    best, bad = (loss, 0) if loss < best else (best, bad + 1)
    if bad == 3:
        break
dist.destroy_process_group()
