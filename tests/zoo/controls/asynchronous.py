# SPDX-License-Identifier: Apache-2.0
"""Asynchronous collectives that are waited for much later."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
works = []
for step in range(10):
    works.append(dist.all_reduce(torch.ones(1000), async_op=True))
time.sleep(3)
for work in works:
    work.wait()
dist.destroy_process_group()
