# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
import torch.cuda.amp as amp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_


def step(net, opt, scaler, x, y):
    opt.zero_grad()
    with torch.autocast("cuda"):
        loss = torch.nn.functional.mse_loss(net(x), y)
    scaler.scale(loss).backward()
    clip_grad_norm_(net.parameters(), 1.0)  # expect: DDP335
    scaler.step(opt)
    scaler.update()


def step_wrong(net, opt, scaler, x, y):
    opt.zero_grad()
    with amp.autocast(enabled=True):  # expect: DDP336
        loss = torch.nn.functional.mse_loss(net(x), y)
    scaler.scale(loss).backward()
    opt.step()  # expect: DDP335
    scaler.update()


def main(net, loader):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    net = DDP(net.cuda(rank), device_ids=[rank])
    opt = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.cuda.amp.GradScaler()  # expect: DDP336
    other = torch.amp.GradScaler("cuda")
    for x, y in loader:
        step(net, opt, scaler, x, y)
        step_wrong(net, opt, other, x, y)
    dist.destroy_process_group()
