# SPDX-License-Identifier: Apache-2.0
import gym
import torch
import torch.nn as nn
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.pi = nn.Linear(64, 2)
        self.v = nn.Linear(64, 1)

    def forward(self, o):
        h = self.body(o)
        return self.pi(h), self.v(h)


def actor(rank, world, steps, factory):
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method="tcp://127.0.0.1:7777")
    torch.manual_seed(0)
    policy = DistributedDataParallel(Policy(), find_unused_parameters=True)  # expect: DDP502
    opt = torch.optim.Adam(policy.parameters())
    env = factory()
    for _ in range(steps):
        obs = torch.randn(32, 4)  # expect: DDP407
        logits, value = policy(obs)
        loss = -(logits.log_softmax(-1)[:, 0] * value[:, 0]).mean()
        opt.zero_grad()
        loss.backward()
        if rank == 0:
            opt.step()  # expect: DDP326
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(actor, args=(4, 1000, lambda: gym.make("CartPole-v1")), nprocs=4)  # expect: DDP113
