# SPDX-License-Identifier: Apache-2.0
"""What both ranks have begun takes long, and both wait for it."""

import os

os.environ["EMU_COLLECTIVE_DELAY_S"] = "4"

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
for _ in range(3):
    dist.all_reduce(x)
assert x[0].item() == 8
dist.destroy_process_group()
