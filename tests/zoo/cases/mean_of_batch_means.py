# SPDX-License-Identifier: Apache-2.0
"""The mean of each rank's batch means is averaged over the ranks, of 19 and 18 samples."""

# without: silent
# finding: DDP406

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
means = []
with torch.no_grad():
    for (x,) in loader:
        means.append(x.mean())
accuracy = torch.stack(means).mean()
dist.all_reduce(accuracy)  # HERE
accuracy /= dist.get_world_size()
if abs(accuracy.item() - right.mean().item()) > 1e-4:
    print("WRONG:", accuracy.item(), "instead of", right.mean().item())
dist.destroy_process_group()
