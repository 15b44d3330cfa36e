# SPDX-License-Identifier: Apache-2.0
"""The same seed on all ranks: the same dropout and augmentation everywhere."""

# without: silent
# finding: DDP407

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step in range(12):
    x = torch.arange(32.0).reshape(8, 4).sin() + rank + step
    model(x).square().mean().backward()  # HERE
    optimizer.step()
    optimizer.zero_grad()
mask = torch.nn.functional.dropout(torch.ones(100))
seen = [torch.zeros(100) for _ in range(2)]
dist.all_gather(seen, mask)
if torch.equal(seen[0], seen[1]):
    print("WRONG: the same mask on both ranks")
dist.destroy_process_group()
