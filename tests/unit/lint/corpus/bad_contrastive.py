# SPDX-License-Identifier: Apache-2.0
import builtins
import random
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def fix(seed=0):
    random.seed(seed)
    torch.manual_seed(seed)


class MoCo(nn.Module):
    def __init__(self, enc):
        super().__init__()
        self.enc = enc

    def forward(self, a, b):
        return (self.enc(a) * self.enc(b)).sum(-1).mean()


def view(x):
    noise = torch.randn(x.size(), device=x.device)  # expect: DDP407
    return x + 0.05 * noise


def main(rank, world, enc, ds):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    fix()
    moco = DDP(MoCo(enc).cuda(), device_ids=[rank])
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 64, shuffle=True, sampler=sampler)  # expect: DDP413
    opt = torch.optim.SGD(moco.parameters(), 0.03)
    for ep in range(200):
        sampler.set_epoch(ep)
        for x in loader:
            x = x.cuda(non_blocking=True)
            loss = -moco(view(x), view(x))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save({"enc": moco.state_dict()}, f"moco_{ep}.pt")  # expect: DDP602
        torch.distributed.barrier()
    dist.destroy_process_group()
