# SPDX-License-Identifier: Apache-2.0
"""DistributedSampler with set_epoch, and evaluation of an even dataset."""

from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
dataset = TensorDataset(torch.randn(128, 4))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
validation = DataLoader(
    TensorDataset(torch.randn(32, 4)), batch_size=8, sampler=DistributedSampler(range(32), shuffle=False)
)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for (x,) in validation:
            model.module(x)
    model.train()
dist.destroy_process_group()
