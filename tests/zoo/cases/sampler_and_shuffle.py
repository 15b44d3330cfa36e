# SPDX-License-Identifier: Apache-2.0
"""A sampler and shuffle=True."""

# without: error
# finding: DDP413

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 4))
loader = DataLoader(dataset, batch_size=8, shuffle=True, sampler=DistributedSampler(dataset))  # HERE
dist.destroy_process_group()
