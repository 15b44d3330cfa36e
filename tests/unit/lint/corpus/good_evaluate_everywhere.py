# SPDX-License-Identifier: Apache-2.0
"""Evaluation on all ranks, sums reduced before the division."""

import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    for x, y in loader:
        pred = model(x.to(device)).argmax(1)
        counts += torch.stack([(pred == y.to(device)).sum(), torch.tensor(y.numel(), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main(train_set, test_set):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device(f"cuda:{local_rank}")
    model = DDP(torchvision.models.resnet50().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 32, sampler=sampler)
    test_loader = DataLoader(test_set, 32, sampler=DistributedSampler(test_set, shuffle=False))
    best = 0.0
    for epoch in range(10):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader, device)
        if dist.get_rank() == 0:
            print(accuracy)
        if accuracy > best:
            best = accuracy
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), "best.pt")
        dist.barrier()
    dist.destroy_process_group()
