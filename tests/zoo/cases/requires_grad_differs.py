# SPDX-License-Identifier: Apache-2.0
"""One rank has frozen a layer."""

# without: error
# finding: DDP304, rank 1

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
inner[0].bias.requires_grad_(rank == 0)
model = DDP(inner)  # HERE
dist.destroy_process_group()
