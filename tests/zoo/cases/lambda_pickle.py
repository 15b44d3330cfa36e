# SPDX-License-Identifier: Apache-2.0
"""A lambda is sent through a collective."""

# without: error
# finding: DDP113

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

found = [None, None]
dist.all_gather_object(found, {"transform": lambda x: x})  # HERE
