# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class MLP(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = torch.nn.Linear(width, width)
        self.b = torch.nn.Linear(width, 1)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


def micro_steps(net, xs, ys):
    for i, (x, y) in enumerate(zip(xs, ys)):
        out = net(x)
        loss = F.mse_loss(out, y) / len(xs)
        if i < len(xs) - 1:
            with net.no_sync():  # expect: DDP328
                loss.backward()
        else:
            loss.backward()


def plain_accumulation(net, opt, loader, k):
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        loss = F.mse_loss(net(x), y)
        (loss / k).backward()  # expect: DDP505
        if (i + 1) % k == 0 or i + 1 == len(loader):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()


def main(loader):
    dist.init_process_group("gloo")
    kwargs = dict(find_unused_parameters=True)
    net = DDP(MLP(16), find_unused_parameters=True)  # expect: DDP502
    opt = torch.optim.SGD(net.parameters(), 0.1)
    plain_accumulation(net, opt, loader, 4)
    for xs, ys in loader:
        micro_steps(net, xs, ys)
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()
