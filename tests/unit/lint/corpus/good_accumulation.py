# SPDX-License-Identifier: Apache-2.0
"""`no_sync` for all micro-batches but the last."""

import contextlib
import os

import torch
import torch.distributed as dist
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
    scaler = torch.amp.GradScaler("cuda")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            last = (step + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cuda"):
                    loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()) / ACCUMULATE
                scaler.scale(loss).backward()
            if last:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
    dist.destroy_process_group()
