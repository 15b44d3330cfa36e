# SPDX-License-Identifier: Apache-2.0
"""A contrastive loss over the features of all ranks, gathered with and without their gradients."""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather as gather_with_gradients
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
for step in range(20):
    features = torch.nn.functional.normalize(model(torch.randn(16, 4)), dim=1)
    if step % 2:
        others = torch.cat(gather_with_gradients(features))
    else:
        parts = [torch.zeros_like(features) for _ in range(2)]
        dist.all_gather(parts, features.detach())
        parts[rank] = features
        others = torch.cat(parts)
    target = torch.arange(16) + 16 * rank
    torch.nn.functional.cross_entropy(features @ others.T / 0.1, target).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
