# SPDX-License-Identifier: Apache-2.0
"""A stream that the program divides among ranks and workers by itself."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Stream(IterableDataset):
    """Each worker's own part."""

    def __iter__(self):
        worker = get_worker_info()
        part = rank * worker.num_workers + worker.id
        for number in range(part, 160, 2 * worker.num_workers):
            yield torch.full((4,), float(number)) / 100


model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    for x in DataLoader(Stream(), batch_size=8, num_workers=2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
