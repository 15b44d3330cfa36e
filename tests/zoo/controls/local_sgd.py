# SPDX-License-Identifier: Apache-2.0
"""Ranks train apart, and average their weights every fourth step."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(16):
    model(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 3:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= 2
dist.destroy_process_group()
