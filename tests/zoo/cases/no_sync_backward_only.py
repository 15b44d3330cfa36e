# SPDX-License-Identifier: Apache-2.0
"""no_sync around backward alone has no effect."""

# without: ok
# finding: DDP328

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(8):
    for micro in range(4):
        loss = model(torch.randn(8, 4)).square().mean() / 4
        if micro < 3:
            with model.no_sync():
                loss.backward()  # HERE
        else:
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
