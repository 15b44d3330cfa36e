# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split as cut


def folds(ds, k):
    idx = torch.randperm(len(ds))  # expect: DDP415
    return [Subset(ds, idx[i::k].tolist()) for i in range(k)]


def main(ds, net):
    dist.init_process_group("gloo")
    rest, test = cut(ds, [0.8, 0.2])  # expect: DDP415
    for fold in folds(rest, 5):
        sampler = DistributedSampler(fold)
        loader = DataLoader(fold, 8, sampler=sampler)
        model = DDP(net)
        opt = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x in loader:
                model(x).mean().backward()
                opt.step()
                opt.zero_grad()
    dist.destroy_process_group()
