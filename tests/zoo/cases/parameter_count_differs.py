# SPDX-License-Identifier: Apache-2.0
"""One rank has a layer more."""

# without: error
# finding: DDP301

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = (
    [torch.nn.Linear(4, 4)] + [torch.nn.Linear(4, 4)] * 0
    if rank == 0
    else [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]
)
model = DDP(torch.nn.Sequential(*layers))  # HERE
dist.destroy_process_group()
