# SPDX-License-Identifier: Apache-2.0
"""Metrics are reduced asynchronously, and waited for when the next ones are logged."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
pending, history = None, []
for step in range(40):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        if pending is not None:
            pending[1].wait()
            history.append(pending[0].item() / 2)
        value = loss.detach().clone()
        pending = value, dist.all_reduce(value, async_op=True)
pending[1].wait()
dist.destroy_process_group()
