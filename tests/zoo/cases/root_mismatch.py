# SPDX-License-Identifier: Apache-2.0
"""Each rank broadcasts from itself."""

# without: hang
# finding: DDP205

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.ones(4)
dist.all_reduce(x)
dist.broadcast(x, src=rank)  # HERE
dist.all_reduce(x)
dist.barrier()
dist.destroy_process_group()
