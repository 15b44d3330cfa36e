# SPDX-License-Identifier: Apache-2.0
import random
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset


def seed_worker(worker_id):
    s = torch.initial_seed() % 2**32
    np.random.seed(s)
    random.seed(s)


def split(n, seed):
    idx = np.random.RandomState(seed).permutation(n)
    return idx[: n // 10], idx[n // 10 :]


def other_split(n):
    np.random.seed(0)
    return np.random.permutation(n)


def files(names):
    rng = random.Random(3)
    rng.shuffle(names)
    return names[:10], names[10:]


def main(ds, net, names, rank):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    a, b = split(len(ds), 0)
    f, h = files(names)
    train = Subset(ds, a)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler, worker_init_fn=seed_worker)
    net = DDP(net)
    torch.manual_seed(rank)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x in loader:
            perm = torch.randperm(len(x))
            lam = np.random.beta(1, 1)
            net(lam * x + (1 - lam) * x[perm]).mean().backward()
            opt.step()
            opt.zero_grad()
    dist.destroy_process_group()
