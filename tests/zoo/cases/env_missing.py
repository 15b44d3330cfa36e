# SPDX-License-Identifier: Apache-2.0
"""The script reads torchrun's variables, and was started without them."""

# without: error
# finding: DDP101

import os

import torch.distributed as dist

os.environ.pop("RANK")  # as with `python train.py`
dist.init_process_group("gloo")  # HERE
