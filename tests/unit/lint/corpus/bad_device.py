# SPDX-License-Identifier: Apache-2.0
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"  # expect: DDP118


def batches(ds, epochs):
    order = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, 16, sampler=order)
    for epoch in range(epochs):
        order.set_epoch(epoch)
        yield from loader


def main(ds, net):
    warm = torch.zeros(1).to(DEVICE)
    dist.init_process_group("nccl")
    net = DDP(net.to(DEVICE))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in batches(ds, 3):
        loss = (net(x.to(DEVICE)) - y.to(DEVICE)).pow(2).mean() + warm
        loss.backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    data = torch.load("data.pt", weights_only=True, map_location="cpu")
    main(data, torch.nn.Linear(4, 1))
