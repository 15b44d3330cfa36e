# SPDX-License-Identifier: Apache-2.0
"""A loader's worker of one rank waits for a lock forever."""

# without: hang
# finding: DDP213, rank 1

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)


class Locked(torch.utils.data.Dataset):
    """Its sample 12 never comes on rank 1."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if rank == 1 and index == 12:
            time.sleep(3600)
        return torch.randn(4)


for x in torch.utils.data.DataLoader(Locked(), batch_size=4, num_workers=1):  # HERE
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
