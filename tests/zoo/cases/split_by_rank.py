# SPDX-License-Identifier: Apache-2.0
"""random_split with a seed of each rank's own: one rank trains on what the other one validates with."""

# without: silent
# finding: DDP403

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
numbers = torch.arange(64.0)
training, validation = random_split(TensorDataset(numbers), [48, 16])
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
trained = torch.zeros(64)
for (x,) in DataLoader(training, batch_size=4, sampler=DistributedSampler(training)):  # HERE
    model(x[:, None]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    trained[x.long()] += 1
dist.all_reduce(trained)
num_both = int((trained[validation.indices] > 0).sum())
if num_both:
    print(f"WRONG: of rank {rank}'s 16 samples for validation {num_both} were trained on")
dist.destroy_process_group()
