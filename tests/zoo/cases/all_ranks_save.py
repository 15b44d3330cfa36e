# SPDX-License-Identifier: Apache-2.0
"""Every rank writes the same checkpoint file."""

# without: ok
# finding: DDP603

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
path = os.path.join(tempfile.gettempdir(), f"zoo-{os.environ['MASTER_PORT']}.pt")
for step in range(6):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.module.state_dict(), path)  # HERE
dist.barrier()
if rank == 0:
    os.unlink(path)
dist.destroy_process_group()
