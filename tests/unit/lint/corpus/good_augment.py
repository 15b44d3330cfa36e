# SPDX-License-Identifier: Apache-2.0
import random
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, paths, seed):
        self.paths = sorted(paths)
        random.Random(seed).shuffle(self.paths)
        self.train = True

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        x = torch.full((3, 8, 8), float(i))
        if random.random() < 0.5:
            x = x.flip(-1)
        return x + np.random.uniform(-0.1, 0.1), i % 10


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    seed_all(7)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10), torch.nn.Dropout(0.1))
    net = DDP(net)
    seed_all(7 + rank)
    ds = Images([str(i) for i in range(100)], seed=3)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 16, sampler=sampler, num_workers=2, generator=torch.Generator().manual_seed(rank))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            lam = np.random.beta(0.2, 0.2)
            perm = torch.randperm(len(x))
            out = net(lam * x + (1 - lam) * x[perm])
            loss = torch.nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    dist.destroy_process_group()
