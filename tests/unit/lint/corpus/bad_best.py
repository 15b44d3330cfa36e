# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
from torch import load as read, save as write
from torch.nn.parallel import DistributedDataParallel as DDP


def finish(net, rank, path):
    if rank == 0:
        write(net.state_dict(), path)
    best = read(path, map_location=f"cuda:{rank}", weights_only=True)  # expect: DDP608
    net.load_state_dict(best)
    return net


def main(rank, size, model, loader):
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    net = DDP(model.to(rank), device_ids=[rank])
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for x in loader:
        net(x.to(rank)).mean().backward()
        opt.step()
        opt.zero_grad()
    finish(net, rank, "best.pt")
    dist.destroy_process_group()
