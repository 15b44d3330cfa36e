# SPDX-License-Identifier: Apache-2.0
"""device_ids were kept in a run on the CPU."""

# without: error
# finding: DDP306

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2), device_ids=[rank])  # HERE
dist.destroy_process_group()
