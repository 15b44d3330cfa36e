# SPDX-License-Identifier: Apache-2.0
"""Layers are built from a set, whose order differs between ranks."""

# without: silent
# finding: DDP327

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
names = ["left", "right"] if rank == 0 else ["right", "left"]
model = DDP(torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in names}))  # HERE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(5):
    x = torch.randn(8, 4)
    (model.module["left"](x) + 2 * model.module["right"](x)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
mine = torch.stack([model.module[name].weight.detach().sum() for name in ("left", "right")])
seen = [torch.zeros(2) for _ in range(2)]
dist.all_gather(seen, mine)
if rank == 0 and not torch.equal(seen[0], seen[1]):
    print("WRONG: the ranks' layers differ", seen)
dist.destroy_process_group()
