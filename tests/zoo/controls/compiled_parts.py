# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks inside a wrapped model, and a loss that is compiled by itself."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Net(torch.nn.Module):
    """A small one."""

    def __init__(self):
        super().__init__()
        self.body = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh()), backend="aot_eager")
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


@torch.compile(backend="eager")
def loss_of(output):
    """Of a batch."""
    return output.square().mean()


model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
for step in range(20):
    loss_of(model(torch.randn(8, 4))).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
