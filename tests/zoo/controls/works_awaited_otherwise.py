# SPDX-License-Identifier: Apache-2.0
"""Asynchronous collectives whose works are kept, polled, or followed by a barrier before the result is used."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    torch.manual_seed(10 * step + rank)
    model(torch.randn(8, 8)).square().mean().backward()
    works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
    for work in works:
        work.wait()
    polled = dist.all_reduce(torch.ones(1), async_op=True)
    while not polled.is_completed():
        time.sleep(0.001)
    seen = torch.ones(4)
    dist.broadcast(seen, 0, async_op=True)
    dist.barrier()
    seen += 1
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    model.weight.grad /= 2
    model.bias.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
