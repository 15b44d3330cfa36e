# SPDX-License-Identifier: Apache-2.0
"""A pipeline of two stages with send and recv: its ranks do different things."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
stage = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(15):
    if rank == 0:
        y = stage(torch.randn(8, 4))
        dist.send(y.detach(), dst=1)
        gradient = torch.empty(8, 4)
        dist.recv(gradient, src=1)
        y.backward(gradient)
    else:
        x = torch.empty(8, 4)
        dist.recv(x, src=0)
        x.requires_grad_(True)
        stage(x).square().mean().backward()
        dist.send(x.grad, dst=0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
