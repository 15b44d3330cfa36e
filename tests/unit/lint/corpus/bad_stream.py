# SPDX-License-Identifier: Apache-2.0
"""A stream with a sampler; no_sync around backward."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler


class Lines(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with open(self.path) as file:
            for line in file:
                yield torch.tensor([float(line)])


def main(net, path):
    dist.init_process_group("gloo")
    stream = Lines(path)
    loader = DataLoader(stream, batch_size=4, sampler=DistributedSampler(stream))  # expect: DDP416 DDP416
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i, x in enumerate(loader):
        loss = model(x).mean()
        if i % 2 == 0:
            with model.no_sync():  # expect: DDP328
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(torch.nn.Linear(1, 1), os.environ["DATA"])
