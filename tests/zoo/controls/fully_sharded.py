# SPDX-License-Identifier: Apache-2.0
"""FSDP2: parameters, gradients and the optimizer's state are divided among the ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
for step in range(20):
    model(torch.randn(8, 8)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
