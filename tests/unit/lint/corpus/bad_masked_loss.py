# SPDX-License-Identifier: Apache-2.0
"""A mean over unequal numbers of tokens is averaged over ranks."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def perplexity(model, loader, device):
    losses, tokens = 0.0, 0
    for ids, mask in loader:
        loss = model(ids.to(device)) * mask.to(device)
        losses += loss.sum().item()
        tokens += mask.sum().item()
    mean = torch.tensor(losses / tokens, device=device)
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)  # expect: DDP406
    mean = mean / int(os.environ["WORLD_SIZE"])
    return mean.exp()


def train(model, dataset, device):
    model = DDP(model.to(device))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, mask in loader:
            loss = (model(ids.to(device)) * mask.to(device)).sum() / mask.sum()
            if not torch.isfinite(loss):
                print("skipping")
                continue  # expect: DDP210
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(perplexity(model, loader, device))
