# SPDX-License-Identifier: Apache-2.0
"""A critic with a penalty on its gradient, whose backward goes through a backward."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
critic = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.Adam(critic.parameters())
torch.manual_seed(1 + rank)
for step in range(20):
    x = torch.randn(8, 4, requires_grad=True)
    output = critic(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
