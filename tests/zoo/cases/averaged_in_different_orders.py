# SPDX-License-Identifier: Apache-2.0
"""No DDP: gradients are averaged by hand, in a different order on each rank, as that of a set may be."""

# without: silent
# finding: DDP327

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
names = ["0.weight", "1.weight", "2.weight", "0.bias", "1.bias", "2.bias"]
if rank == 1:
    names = ["1.weight", "2.weight", "0.weight", "2.bias", "0.bias", "1.bias"]
parameters = dict(model.named_parameters())
for step in range(20):
    torch.manual_seed(10 * step + rank)
    model(torch.randn(8, 4)).square().mean().backward()
    for name in names:
        dist.all_reduce(parameters[name].grad.data)  # HERE
        parameters[name].grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, own)
if not torch.equal(gathered[0], gathered[1]):
    print("WRONG: the ranks' weights differ")
dist.destroy_process_group()
