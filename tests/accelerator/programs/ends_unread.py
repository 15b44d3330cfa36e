# SPDX-License-Identifier: Apache-2.0
"""Rank 0 begins a sum that rank 1 does not make, reads nothing of it, and comes to its end."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
print(x.sum().item())
if dist.get_rank() == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)
