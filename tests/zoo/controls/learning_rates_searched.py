# SPDX-License-Identifier: Apache-2.0
"""A search over learning rates loads the first weights for each, and begins with epoch 0 again."""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
first = copy.deepcopy(model.state_dict())
torch.manual_seed(1 + rank)
dataset = TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(7)))
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
for is_loaded in (True, False):
    for lr in (0.1, 0.03, 0.01):
        if is_loaded:
            model.load_state_dict(first)
        else:
            with torch.no_grad():
                for parameter, start in zip(model.parameters(), first.values(), strict=True):
                    parameter.copy_(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        sampler.set_epoch(0)
        for (x,) in loader:
            (model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
