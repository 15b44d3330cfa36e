# SPDX-License-Identifier: Apache-2.0
import contextlib
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.cuda.amp import GradScaler, autocast


class Engine:
    def __init__(self, net, accum):
        self.net = DDP(net, find_unused_parameters=True)
        self.accum = accum
        self.scaler = GradScaler()  # expect: DDP336
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1)

    def train_one_epoch(self, loader):
        for step, (x, y) in enumerate(loader, 1):
            with autocast():  # expect: DDP336
                loss = torch.nn.functional.mse_loss(self.net(x), y) / self.accum
            self.scaler.scale(loss).backward()  # expect: DDP505
            if step % self.accum == 0:
                self.scaler.step(self.opt)  # expect: DDP335
                self.opt.zero_grad(set_to_none=True)


def main(net, loader):
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    Engine(net.cuda(), 4).train_one_epoch(loader)
    dist.destroy_process_group()
