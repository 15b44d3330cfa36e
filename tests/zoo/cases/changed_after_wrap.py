# SPDX-License-Identifier: Apache-2.0
"""Rank 0 alone loads a checkpoint into the wrapped model."""

# without: silent
# finding: DDP325, rank 0

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
if rank == 0:
    model.module.load_state_dict({name: torch.zeros_like(t) for name, t in model.module.state_dict().items()})
for step in range(5):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
seen = [torch.zeros(()) for _ in range(2)]
dist.all_gather(seen, sum(p.detach().sum() for p in model.parameters()))
if rank == 0 and seen[0] != seen[1]:
    print("WRONG: the ranks' weights differ", seen)
dist.destroy_process_group()
