# SPDX-License-Identifier: Apache-2.0
"""The number of classes was counted on each rank's own shard."""

# without: error
# finding: DDP302, rank 1

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
num_classes = 10 if rank == 0 else 9
model = DDP(torch.nn.Linear(4, num_classes))  # HERE
dist.destroy_process_group()
