# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
import torch.utils.data as tud
from torch.nn.parallel import DistributedDataParallel as DDP


class Lines(tud.IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with open(self.path) as f:
            for line in f:
                yield torch.tensor([float(v) for v in line.split()])


class Pipeline:
    def __init__(self, path):
        self.stream = Lines(path)
        self.order = tud.distributed.DistributedSampler(self.stream)  # expect: DDP416

    def unsharded(self):
        return tud.DataLoader(self.stream, 8, num_workers=2)  # expect: DDP401


def main(net, path):
    dist.init_process_group("gloo")
    p = Pipeline(path)
    net = DDP(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for x in p.unsharded():
        net(x).mean().backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()
