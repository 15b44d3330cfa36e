# SPDX-License-Identifier: Apache-2.0
"""A range test: the rate grows with each step, then the weights of before are restored."""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
torch.manual_seed(1 + rank)
kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
losses = []
for step in range(20):
    for group in optimizer.param_groups:
        group["lr"] = 1e-4 * 1.5**step
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seen = loss.detach().clone()
    dist.all_reduce(seen)
    losses.append(seen.item() / 2)
model.load_state_dict(kept[0])
optimizer.load_state_dict(kept[1])
for group in optimizer.param_groups:
    group["lr"] = 1e-4 * 1.5 ** losses.index(min(losses))
for step in range(20):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
