# SPDX-License-Identifier: Apache-2.0
"""No DDP: gradients are averaged by hand, those of the head are forgotten."""

# without: silent
# finding: DDP320

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
for step in range(20):
    torch.manual_seed(10 * step + rank)
    head(body(torch.randn(8, 4)).tanh()).square().mean().backward()
    for parameter in body.parameters():
        dist.all_reduce(parameter.grad)  # HERE
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
seen = [torch.zeros(()) for _ in range(2)]
dist.all_gather(seen, head.weight.detach().sum())
if rank == 0 and seen[0] != seen[1]:
    print("WRONG: the ranks' heads differ", seen)
dist.destroy_process_group()
