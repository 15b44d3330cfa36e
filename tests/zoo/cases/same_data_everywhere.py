# SPDX-License-Identifier: Apache-2.0
"""No DistributedSampler: each rank trains on all samples in the same order."""

# without: silent
# finding: DDP401

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(64, 4))
loader = DataLoader(dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0))
for epoch in range(2):
    for (x,) in loader:  # HERE
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
seen = [torch.zeros(8, 4) for _ in range(2)]
dist.all_gather(seen, x)
if torch.equal(seen[0], seen[1]):
    print("WRONG: the same batch on both ranks")
dist.destroy_process_group()
