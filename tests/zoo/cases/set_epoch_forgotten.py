# SPDX-License-Identifier: Apache-2.0
"""Every epoch has the order of the first one."""

# without: silent
# finding: DDP402

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
dataset = TensorDataset(torch.randn(64, 4))
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
orders = []
for epoch in range(3):
    orders.append(list(sampler))
    for (x,) in loader:  # HERE
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if orders[0] == orders[1]:
    print("WRONG: the same order again")
dist.destroy_process_group()
