# SPDX-License-Identifier: Apache-2.0
"""Batch means are weighted with their numbers of samples, over unequal parts."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
right = torch.zeros(37)
right[[0, 1, 4, 7, 10, 16, 18, 20, 22, 25, 27, 30, 33, 34]] = 1
loader = DataLoader(Subset(TensorDataset(right), range(rank, 37, 2)), batch_size=8)
model.eval()
sums = torch.zeros(2)
with torch.no_grad():
    for (x,) in loader:
        sums += torch.stack([x.mean() * len(x), torch.tensor(float(len(x)))])
accuracy = sums[0] / 37
dist.all_reduce(accuracy)
assert abs(accuracy.item() - right.mean().item()) < 1e-4
with torch.no_grad():
    losses = [model.module(torch.ones(len(x), 4)).square().mean() * len(x) / 37 for (x,) in loader]
loss = torch.stack(losses).sum()
dist.all_reduce(loss)
ratio = torch.tensor(0.75)
with torch.no_grad():
    for (x,) in loader:
        pass
dist.all_reduce(ratio)
dist.destroy_process_group()
