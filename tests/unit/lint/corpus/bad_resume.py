# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

OUT = Path("runs/exp1")


def save_checkpoint(path, net, opt, epoch):
    payload = {"net": net.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}
    torch.save(payload, path)  # expect: DDP603


def restore(net, opt):
    blob = torch.load(OUT / "last.pt")  # expect: DDP609 DDP610
    net.module.load_state_dict(blob["net"])
    opt.load_state_dict(blob["opt"])
    return blob["epoch"]


def main(model, loader):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    net = DDP(model.cuda(local), device_ids=[local])
    opt = torch.optim.SGD(net.parameters(), 0.1)
    start = restore(net, opt) if (OUT / "last.pt").exists() else 0
    for epoch in range(start, 10):
        for x in loader:
            net(x.cuda(local)).mean().backward()
            opt.step()
            opt.zero_grad()
        save_checkpoint(OUT / "last.pt", net, opt, epoch)
    dist.destroy_process_group()
