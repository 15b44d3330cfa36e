# SPDX-License-Identifier: Apache-2.0
"""A comm hook that sends gradients as fp16."""

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
for step in range(12):
    model(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
