# SPDX-License-Identifier: Apache-2.0
"""Steps that DDP does not reduce until the ranks are averaged; at the end rank 0 alone loads the best weights."""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(num_local):
    """Train a model; the last `num_local` steps are each rank's own, then the ranks are averaged."""
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)
    best = (float("inf"), {})
    for step in range(38):
        own = step >= 38 - num_local
        loss = (model.module if own else model)(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and not own:
            best = min(best, (loss.item(), copy.deepcopy(model.module.state_dict())), key=lambda one: one[0])
    if num_local:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= 2
    if rank == 0:
        model.module.load_state_dict(best[1])
    return model


dist.init_process_group("gloo")
rank = dist.get_rank()
for num_local in (0, 3):
    train(num_local)
dist.barrier()
dist.destroy_process_group()
