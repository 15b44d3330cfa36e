# SPDX-License-Identifier: Apache-2.0
"""Mean losses of four micro-batches are added up, and nothing divides by four."""

# without: silent
# finding: DDP333

import contextlib
import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
for step in range(3):
    large_batch, before = torch.randn(32, 4), copy.deepcopy(model.module.state_dict())
    for micro in range(4):
        with model.no_sync() if micro < 3 else contextlib.nullcontext():
            model(large_batch[micro * 8 :][:8]).square().mean().backward()  # HERE
    summed = model.module.weight.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
model.module.load_state_dict(before)
model(large_batch).square().mean().backward()
ratio = summed.norm() / model.module.weight.grad.norm()
if ratio > 1.01:
    print(f"WRONG: the gradient is {ratio:.2f} times that of the large batch")
dist.destroy_process_group()
