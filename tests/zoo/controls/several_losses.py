# SPDX-License-Identifier: Apache-2.0
"""Two losses of one model, a critic's real and fake batches, and tasks whose gradients are put together."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
critic, shared = DDP(torch.nn.Linear(4, 1)), DDP(torch.nn.Linear(4, 3))
generator = DDP(torch.nn.Linear(4, 4))
optimizer, shared_optimizer = torch.optim.Adam(critic.parameters()), torch.optim.Adam(shared.parameters())
generator_optimizer = torch.optim.Adam(generator.parameters())
torch.manual_seed(1 + rank)
for step in range(15):
    real, noise = torch.randn(8, 4), torch.randn(8, 4)
    critic(real).mean().backward()
    fake = generator(noise)
    (-critic(fake.detach()).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    critic.module(fake).mean().backward()
    generator_optimizer.step()
    generator_optimizer.zero_grad()
    optimizer.zero_grad()
    gradients = []
    for task in range(3):
        shared_optimizer.zero_grad()
        shared(real)[:, task].square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in shared.parameters()])
    for parameter, *parts in zip(shared.parameters(), *gradients, strict=True):
        parameter.grad = torch.stack(parts).median(0).values
    shared_optimizer.step()
dist.destroy_process_group()
