# SPDX-License-Identifier: Apache-2.0
"""A bad sample makes one rank's loss NaN, and one step later all ranks' weights are."""

# without: silent
# finding: DDP409, rank 1

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:  # backwards that a rank makes alone, before the model of all ranks is made
    for _ in range(2):
        torch.nn.Linear(4, 2)(torch.ones(1, 4)).sum().backward()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(8):
    x = torch.randn(8, 4)
    if rank == 1 and step == 4:
        x[3] = float("nan")
    model(x).square().mean().backward()  # HERE
    optimizer.step()
    optimizer.zero_grad()
if not all(p.isfinite().all() for p in model.parameters()):
    print("WRONG: the weights are NaN")
dist.destroy_process_group()
