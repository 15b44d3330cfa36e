# SPDX-License-Identifier: Apache-2.0
"""Code of a tutorial: functions that a notebook launches on ranks."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpilot


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_checkpoint(path="model.checkpoint"):
    rank = dist.get_rank()
    ddp_model = DDP(ToyModel())
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()
    ddp_model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    torch.manual_seed(rank)
    loss = nn.functional.mse_loss(ddp_model(torch.randn(20, 10)), torch.randn(20, 5))
    loss.backward()
    optimizer.step()
    print(f"rank {rank}: {loss.item()}")


ddpilot.launch(demo_checkpoint, nproc_per_node=2)
