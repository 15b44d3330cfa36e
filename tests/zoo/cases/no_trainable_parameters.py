# SPDX-License-Identifier: Apache-2.0
"""A frozen model is wrapped."""

# without: error
# finding: DDP305

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2).requires_grad_(False))  # HERE
dist.destroy_process_group()
