# SPDX-License-Identifier: Apache-2.0
"""Collectives of objects of different sizes."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
for step in range(10):
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank, "names": ["x"] * (10 * rank + step)})
    said = [{"step": step} if rank == 0 else None]
    dist.broadcast_object_list(said, src=0)
dist.destroy_process_group()
