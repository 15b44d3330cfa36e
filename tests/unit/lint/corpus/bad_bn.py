# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def conv_block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


class Seg(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = conv_block(3, 16)
        self.up = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        return self.up(self.down(x))


def main(ds, rank):
    dist.init_process_group("nccl")
    torch.cuda.set_device(rank)
    net = DDP(Seg().to(rank), device_ids=[rank])  # expect: DDP408
    order = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=2, sampler=order)
    opt = torch.optim.SGD(net.parameters(), 0.01)
    for epoch in range(20):
        order.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x.to(rank)), y.to(rank))
            loss.backward()
            opt.step()
            opt.zero_grad()
    dist.destroy_process_group()
