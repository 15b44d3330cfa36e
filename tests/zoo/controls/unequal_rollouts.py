# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: rollouts of each rank's own length, as many updates on both."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
policy = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
for rollout in range(6):
    with torch.no_grad():
        states = [torch.randn(4)]
        while len(states) < 20 + 10 * rank + rollout:
            action = torch.distributions.Categorical(logits=policy.module(states[-1])).sample()
            states.append(states[-1] * 0.9 + 0.1 * action + 0.1 * torch.randn(4))
    states = torch.stack(states)
    fewest = torch.tensor([len(states) // 8])
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    for batch in states[torch.randperm(len(states))].split(8)[: int(fewest)]:
        rewards = -batch.square().sum(1)
        choice = torch.distributions.Categorical(logits=policy(batch))
        (-choice.log_prob(choice.sample()) * (rewards - rewards.mean())).mean().backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
