# SPDX-License-Identifier: Apache-2.0
"""One rank has a parameter in another dtype."""

# without: SIGABRT
# finding: DDP303

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inner = torch.nn.Linear(64, 64)
model = DDP(inner if rank == 0 else inner.double())  # HERE
x = torch.randn(8, 64, dtype=torch.float32 if rank == 0 else torch.float64)
model(x).sum().backward()
dist.destroy_process_group()
