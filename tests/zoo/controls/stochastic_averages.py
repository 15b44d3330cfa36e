# SPDX-License-Identifier: Apache-2.0
"""Averaged weights of torch.optim.swa_utils, with a schedule of their own."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
averaged = AveragedModel(model.module)
schedule = SWALR(optimizer, swa_lr=0.05)
torch.manual_seed(1 + rank)
for step in range(30):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step >= 10:
        averaged.update_parameters(model.module)
        schedule.step()
model.module.load_state_dict(averaged.module.state_dict())
dist.destroy_process_group()
