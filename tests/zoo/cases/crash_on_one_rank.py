# SPDX-License-Identifier: Apache-2.0
"""One rank raises; the other says that the connection was closed."""

# without: error
# finding: -, rank 1

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
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1 and step == 2:
        raise KeyError("sample 17 has no label")  # HERE
