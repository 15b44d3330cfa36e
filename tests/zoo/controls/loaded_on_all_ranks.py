# SPDX-License-Identifier: Apache-2.0
"""Every rank loads the same checkpoint into the wrapped model."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(4):
    model(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
state = {name: torch.full_like(t, 0.5) for name, t in model.module.state_dict().items()}
model.module.load_state_dict(state)
for step in range(6):
    model(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
