# SPDX-License-Identifier: Apache-2.0
"""A rank calls a collective on a group of others, and reads what it did not get."""

# without: silent
# finding: DDP223, rank 1

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([0])
total = torch.full((1,), 1.0 + rank)
dist.broadcast(total, 0)
value = torch.full((1,), 7.0 + rank)
dist.all_reduce(value, group=group)  # HERE
if value != 7:
    print("WRONG:", value.item(), "on rank", rank)
dist.barrier()
dist.destroy_process_group()
