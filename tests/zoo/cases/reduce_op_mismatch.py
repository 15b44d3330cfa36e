# SPDX-License-Identifier: Apache-2.0
"""Ranks reduce with different operations: no error, wrong numbers."""

# without: silent
# finding: DDP204

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
import time

for step in range(20):
    x = torch.full((4,), float(rank + 1))
    dist.all_reduce(x, op=dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)  # HERE
    time.sleep(0.1)
print("WRONG: the sum or the maximum?", x)
dist.destroy_process_group()
