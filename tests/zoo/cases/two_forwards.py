# SPDX-License-Identifier: Apache-2.0
"""Two forwards, then two backwards: the second one is not reduced."""

# without: silent
# finding: DDP322

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(5):
    torch.manual_seed(10 * step + rank)
    first, second = model(torch.randn(8, 4)).square().mean(), model(torch.randn(8, 4)).square().mean()
    first.backward()
    second.backward()  # HERE
    optimizer.step()
    optimizer.zero_grad()
seen = [torch.zeros(()) for _ in range(2)]
dist.all_gather(seen, sum(p.detach().sum() for p in model.parameters()))
if rank == 0 and seen[0] != seen[1]:
    print("WRONG: the ranks' weights differ", seen)
dist.destroy_process_group()
