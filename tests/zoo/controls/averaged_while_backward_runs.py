# SPDX-License-Identifier: Apache-2.0
"""No DDP: gradients of two optimizers are averaged by hooks, asynchronously, next to metrics of the same size."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
nets = (first, second) if rank == 0 else (second, first)  # names differ between ranks, orders do not
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
works: list[dist.Work] = []


def reduce_gradient(parameter: torch.Tensor) -> None:
    """Begin to sum the gradient of `parameter` over the ranks."""
    work = dist.all_reduce(parameter.grad.data, async_op=True)
    assert work is not None
    works.append(work)


for net in (first, second):
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(reduce_gradient)
for step in range(12):
    torch.manual_seed(10 * step + rank)
    second(first(torch.randn(8, 4)).tanh()).square().mean().backward()
    while works:
        works.pop().wait()
    for net, optimizer in zip((first, second), optimizers, strict=True):
        for parameter in net.parameters():
            parameter.grad /= 2
            metric = parameter.grad.clone()
            dist.all_reduce(metric)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
