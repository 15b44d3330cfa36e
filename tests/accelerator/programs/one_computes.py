# SPDX-License-Identifier: Apache-2.0
"""Rank 0 reads a sum that lacks rank 1, which computes for longer than anybody waits."""
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
dist.all_reduce(x)
print(x.sum().item())
dist.destroy_process_group()
