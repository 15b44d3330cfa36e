# SPDX-License-Identifier: Apache-2.0
"""static_graph and gradient_as_bucket_view."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2), static_graph=True, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(1 + rank)
for step in range(12):
    model(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
