# SPDX-License-Identifier: Apache-2.0
"""The loaders' lengths differ, which is known when the epoch begins."""

# without: hang
# finding: DDP404

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
dataset = TensorDataset(torch.randn(40 if rank == 0 else 32, 4))
for (x,) in DataLoader(dataset, batch_size=8):  # HERE
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
