# SPDX-License-Identifier: Apache-2.0
"""The same noise on all ranks; a wrapper that looks for unused parameters of a model that has none."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Generator(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 64), nn.ReLU())
        self.head = nn.Linear(64, 784)

    def forward(self, z):
        return torch.tanh(self.head(self.net(z)))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(784, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


def main(dataset):
    torch.manual_seed(1234)
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    g = DDP(Generator(32).to(device), device_ids=[local_rank], find_unused_parameters=True)  # expect: DDP502
    d = DDP(Discriminator().to(device), device_ids=[local_rank])  # expect: DDP408
    opt_g, opt_d = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for real, _ in loader:
            z = torch.randn(real.size(0), 32, device=device)  # expect: DDP407
            fake = g(z)
            loss_d = d(fake.detach()).mean() - d(real.to(device)).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            loss_g = -d(fake).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
    dist.destroy_process_group()
