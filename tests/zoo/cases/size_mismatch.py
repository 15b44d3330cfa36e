# SPDX-License-Identifier: Apache-2.0
"""A tensor has another size on each rank."""

# without: SIGABRT
# finding: DDP202

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
for step in range(3):
    dist.all_reduce(torch.ones(4))
losses = torch.ones(10 + rank)
dist.all_reduce(losses)  # HERE
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
