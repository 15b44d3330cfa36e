# SPDX-License-Identifier: Apache-2.0
"""TORCH_DISTRIBUTED_DEBUG=DETAIL, to find out why something hangs."""

# without: SIGSEGV
# finding: DDP606

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
dist.set_debug_level_from_env()
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 2))  # HERE
