# SPDX-License-Identifier: Apache-2.0
"""The process group is destroyed, and made anew."""

import os
import tempfile

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
for step in range(5):
    dist.all_reduce(torch.ones(4))
dist.barrier()
dist.destroy_process_group()
path = os.path.join(tempfile.gettempdir(), f"zoo-{os.environ['MASTER_PORT']}")
store = dist.FileStore(path, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
for step in range(3):
    dist.all_reduce(torch.ones(2))
dist.barrier()
dist.destroy_process_group()
del store
if rank == 0 and os.path.exists(path):
    os.unlink(path)
