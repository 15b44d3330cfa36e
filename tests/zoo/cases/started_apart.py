# SPDX-License-Identifier: Apache-2.0
"""No DDP: gradients are averaged by hand, of models that each rank has made with a seed of its own."""

# without: silent
# finding: DDP325

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model(torch.randn(8, 4)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # HERE
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
seen = [torch.zeros(()) for _ in range(2)]
dist.all_gather(seen, model[0].weight.detach().sum())
if rank == 0 and seen[0] != seen[1]:
    print("WRONG: the ranks' models differ", seen)
dist.destroy_process_group()
