# SPDX-License-Identifier: Apache-2.0
"""The root of a broadcast goes on to a sum, which needs rank 1 as well: it computes for longer than anybody waits."""
# without: hang
# finding: DDP218, rank 1

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
print(x.sum().item())
if dist.get_rank() == 1:
    time.sleep(30)  # HERE
dist.broadcast(x, 0)
dist.all_reduce(x)
if dist.get_rank() == 0:
    time.sleep(20)
print(x.sum().item())
dist.destroy_process_group()
