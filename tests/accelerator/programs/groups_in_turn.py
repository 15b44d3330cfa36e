# SPDX-License-Identifier: Apache-2.0
"""Two groups of the same ranks, used in another order on each, and each result is read before the next."""
# without: hang
# finding: DDP206

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
x = torch.ones(4)
for group in (first, second) if rank == 0 else (second, first):
    dist.all_reduce(x, group=group)  # HERE
    print(x.sum().item())
dist.destroy_process_group()
