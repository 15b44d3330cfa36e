# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class Base(IterableDataset):
    def __init__(self, files):
        self.files = files

    def __iter__(self):
        for f in self.files:
            yield from open(f)


class Shards(Base):
    pass


def make(files, batch):
    stream = Shards(files)
    return DataLoader(stream, batch_size=batch, sampler=DistributedSampler(stream))  # expect: DDP416 DDP416


def main(net, files):
    dist.init_process_group("gloo")
    net = DDP(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for x in make(files, 8):
        net(x).mean().backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()
