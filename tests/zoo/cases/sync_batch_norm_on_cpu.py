# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm in a run on the CPU."""

# without: error
# finding: DDP307

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inner = torch.nn.SyncBatchNorm.convert_sync_batchnorm(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
)
model = DDP(inner)  # HERE
model(torch.randn(32, 4)).sum().backward()
dist.destroy_process_group()
