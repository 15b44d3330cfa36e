# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def init_worker(worker_id):
    np.random.seed(1234)  # expect: DDP407


def main(ds, net, rank):
    dist.init_process_group("gloo")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 8, sampler=sampler, num_workers=4, worker_init_fn=init_worker)
    other = DataLoader(ds, 8, sampler=sampler, worker_init_fn=lambda i: np.random.seed(i))  # expect: DDP407
    torch.manual_seed(rank)
    net = DDP(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x in loader:
            net(x).mean().backward()
            opt.step()
            opt.zero_grad()
        for x in other:
            net(x).mean().backward()
            opt.step()
            opt.zero_grad()
    dist.destroy_process_group()
