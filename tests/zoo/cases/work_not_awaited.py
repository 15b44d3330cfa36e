# SPDX-License-Identifier: Apache-2.0
"""Gradients are averaged by asynchronous collectives that nothing waits for."""

# without: silent
# finding: DDP222

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(3000, 3000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    torch.manual_seed(10 * step + rank)
    model(torch.randn(8, 3000)).square().mean().backward()
    own = model.weight.grad.clone()
    total = own.clone()
    dist.all_reduce(total)
    dist.all_reduce(model.weight.grad, async_op=True)  # HERE
    model.weight.grad /= dist.get_world_size()
    if not torch.allclose(model.weight.grad, total / 2):
        print("WRONG: not the mean of the ranks' gradients")
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
