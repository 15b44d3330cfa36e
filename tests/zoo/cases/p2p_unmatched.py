# SPDX-License-Identifier: Apache-2.0
"""Rank 0 waits for a message that rank 1 sends under another tag."""

# without: hang
# finding: DDP219

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.ones(4)
if rank == 0:
    dist.recv(x, src=1, tag=1)  # HERE
else:
    dist.send(x, dst=0, tag=2)
    dist.recv(x, src=0, tag=3)
dist.destroy_process_group()
