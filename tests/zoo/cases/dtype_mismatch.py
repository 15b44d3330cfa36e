# SPDX-License-Identifier: Apache-2.0
"""A tensor has another dtype on each rank."""

# without: SIGABRT
# finding: DDP203

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
for step in range(3):
    dist.all_reduce(torch.ones(4))
correct = torch.ones(16) if rank == 0 else torch.ones(16, dtype=torch.float64)
dist.all_reduce(correct)  # HERE
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
