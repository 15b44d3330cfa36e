# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of the wrapped model is loaded into the plain one."""

# without: error
# finding: DDP602

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
torch.nn.Linear(4, 2).load_state_dict(model.state_dict())  # HERE
dist.destroy_process_group()
