# SPDX-License-Identifier: Apache-2.0
import random
import numpy as np
import torch
import torch.distributed as dist
from sklearn.model_selection import train_test_split
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset


def parts(ds):
    order = np.random.permutation(len(ds))  # expect: DDP415
    cut = int(0.9 * len(ds))
    return Subset(ds, order[:cut]), Subset(ds, order[cut:])


def shuffled_files(files):
    random.shuffle(files)  # expect: DDP415
    return files[: len(files) // 10], files[len(files) // 10 :]


def table_parts(rows):
    return train_test_split(rows, test_size=0.1)  # expect: DDP415


def main(ds, files, rows, net):
    dist.init_process_group("gloo")
    train, val = parts(ds)
    held, kept = shuffled_files(files)
    a, b = table_parts(rows)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler)
    net = DDP(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x in loader:
            net(x).mean().backward()
            opt.step()
            opt.zero_grad()
    dist.destroy_process_group()
