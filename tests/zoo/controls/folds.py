# SPDX-License-Identifier: Apache-2.0
"""Five folds one after the other, each with a model of its own on both ranks."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = torch.randn(80, 4, generator=torch.Generator().manual_seed(7))
for fold in range(5):
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = set(range(fold * 16, fold * 16 + 16))
    training = Subset(TensorDataset(data), [at for at in range(80) if at not in held])
    sampler = DistributedSampler(training, seed=3)
    loader = DataLoader(training, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        part = data[sorted(held)][rank::2]
        sums = torch.tensor([model.module(part).square().sum(), len(part)])
    dist.all_reduce(sums)
dist.destroy_process_group()
