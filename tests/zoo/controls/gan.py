# SPDX-License-Identifier: Apache-2.0
"""Two models with two optimizers, in turn."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
generator = DDP(torch.nn.Linear(4, 4))
critic = DDP(torch.nn.Linear(4, 1))
generator_optimizer = torch.optim.Adam(generator.parameters())
critic_optimizer = torch.optim.Adam(critic.parameters())
torch.manual_seed(1 + rank)
for step in range(15):
    real, noise = torch.randn(32, 4), torch.randn(32, 4)
    fake = generator(noise)
    loss = critic(torch.cat([real, fake.detach()]))
    (loss[:32].mean() - loss[32:].mean()).backward()
    critic_optimizer.step()
    critic_optimizer.zero_grad()
    for parameter in critic.parameters():
        parameter.requires_grad_(False)
    critic.module(fake).mean().backward()
    for parameter in critic.parameters():
        parameter.requires_grad_(True)
    generator_optimizer.step()
    generator_optimizer.zero_grad()
dist.destroy_process_group()
