# SPDX-License-Identifier: Apache-2.0
"""Rank 1 has enqueued its last step before its device has computed the loss that is NaN; rank 0 enqueues it later."""

# without: silent
# finding: DDP409, rank 1

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(8):
    x = torch.randn(8, 4)
    if step == 4 and rank == 1:
        x[3] = float("nan")
        release = sys.modules["emu_C"].hold_stream(torch.accelerator.current_device_index())
    if step == 5 and rank == 0:
        store.wait(["rank 1 has enqueued all"])
    model(x).square().mean().backward()  # HERE
    optimizer.step()
    optimizer.zero_grad()
if rank == 1:
    release()
    store.set("rank 1 has enqueued all", "")
if not all(p.isfinite().all() for p in model.parameters()):
    print("WRONG: the weights are NaN")
dist.destroy_process_group()
