# SPDX-License-Identifier: Apache-2.0
"""No DDP: each rank makes its model with a seed of its own, and rank 0's is copied before or after the first steps."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for num_before in (0, 3):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        if step == num_before:
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
        model(torch.randn(8, 4)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
