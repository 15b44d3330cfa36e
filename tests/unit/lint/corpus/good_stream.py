# SPDX-License-Identifier: Apache-2.0
"""Each rank yields every world_size-th line."""

import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    def __init__(self, path, rank, world_size):
        self.path, self.rank, self.world_size = path, rank, world_size

    def __iter__(self):
        with open(self.path) as file:
            for line in itertools.islice(file, self.rank, None, self.world_size):
                yield torch.tensor([float(line)])


def main(net, path):
    dist.init_process_group("gloo")
    loader = DataLoader(Lines(path, dist.get_rank(), dist.get_world_size()), batch_size=4)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for x in loader:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
