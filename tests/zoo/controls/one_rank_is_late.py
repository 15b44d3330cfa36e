# SPDX-License-Identifier: Apache-2.0
"""One rank comes five seconds late to the first meeting."""

import os
import time

import torch
import torch.distributed as dist

if os.environ["RANK"] == "1":
    time.sleep(5)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
