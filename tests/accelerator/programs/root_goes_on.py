# SPDX-License-Identifier: Apache-2.0
"""The root of a broadcast goes on with work of its own, and the other rank comes later."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
if dist.get_rank() == 1:
    time.sleep(6)
dist.broadcast(x, 0)
if dist.get_rank() == 0:
    time.sleep(8)
print(x.sum().item())
dist.barrier()
dist.destroy_process_group()
