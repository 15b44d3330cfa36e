# SPDX-License-Identifier: Apache-2.0
"""Rank 0 reads what it has received, and rank 1, which has nothing to send, comes to its end."""
# without: hang
# finding: DDP219

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
print(x.sum().item())
if dist.get_rank() == 0:
    dist.recv(x, src=1)  # HERE
    print(x.sum().item())
