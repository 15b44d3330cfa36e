# SPDX-License-Identifier: Apache-2.0
"""Ranks call different collectives on the same group."""

# without: hang
# finding: DDP201

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.ones(4)
dist.all_reduce(x)
y = torch.ones(4)
if x.mean() + rank > dist.get_world_size():
    dist.broadcast(y, src=0)  # HERE
else:
    dist.all_reduce(y)  # HERE
dist.destroy_process_group()
