# SPDX-License-Identifier: Apache-2.0
"""The same seed on all ranks: the same noise is added to each one's batches, outside of the model."""

# without: silent
# finding: DDP407

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(64, 4))
for (x,) in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)):
    noise = torch.randn_like(x)
    (model(x + noise) - noise).square().mean().backward()  # HERE
    optimizer.step()
    optimizer.zero_grad()
seen = [torch.zeros(8, 4) for _ in range(2)]
dist.all_gather(seen, noise)
if torch.equal(seen[0], seen[1]):
    print("WRONG: the same noise on both ranks")
dist.destroy_process_group()
