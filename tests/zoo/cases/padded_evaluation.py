# SPDX-License-Identifier: Apache-2.0
"""DistributedSampler repeats samples in validation, which count twice."""

# without: silent
# finding: DDP405

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
for step in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dataset = TensorDataset(torch.arange(21.0).unsqueeze(1).expand(21, 4).clone())
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False))
model.eval()
count = torch.zeros(1)
with torch.no_grad():
    for (x,) in loader:  # HERE
        model.module(x)
        count += len(x)
dist.all_reduce(count)
if count != 21:
    print("WRONG:", count.item(), "samples of 21")
dist.destroy_process_group()
