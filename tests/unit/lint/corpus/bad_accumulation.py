# SPDX-License-Identifier: Apache-2.0
"""Accumulation with an exchange in every micro-batch, and mixed precision without unscaling."""

import os

import torch
import torch.distributed as dist
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 8


def main(dataset, net):
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = DDP(net.cuda(rank), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters())
    scaler = GradScaler()  # expect: DDP336
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, shuffle=True)  # expect: DDP413
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            with autocast():  # expect: DDP336
                loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()) / ACCUMULATE
            scaler.scale(loss).backward()  # expect: DDP505
            if (step + 1) % ACCUMULATE == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: DDP335
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
    dist.destroy_process_group()
