# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def accuracy(net, loader, device):
    hits, total = 0, 0
    for x, y in loader:
        hits += (net(x.to(device)).argmax(1) == y.to(device)).sum().item()
        total += y.size(0)
    acc = torch.tensor(hits / total, device=device)
    dist.all_reduce(acc, op=dist.ReduceOp.SUM)  # expect: DDP406
    return acc / dist.get_world_size()


def mean_loss(losses):
    count, total = 0, 0.0
    for loss, n in losses:
        total += loss * n
        count += len(loss) * n
    t = torch.tensor([total / count])
    everyone = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, t)  # expect: DDP406
    return torch.cat(everyone).mean()


def main(net, loader, device):
    dist.init_process_group("gloo")
    net = DDP(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for step, (x, y) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        print("step %d: %f" % (step, losses[-1]))  # expect: DDP411
    if dist.get_rank() == 0:
        print(mean_loss(losses))  # expect: DDP220
    print(accuracy(net, loader, device))
    dist.destroy_process_group()
