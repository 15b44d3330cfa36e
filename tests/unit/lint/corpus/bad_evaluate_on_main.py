# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the wrapper on rank 0, and a mean of shares."""

import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def evaluate(model, loader, device):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for x, y in loader:
            pred = model(x.to(device)).argmax(1)
            correct += (pred == y.to(device)).sum().item()
            total += y.numel()
    acc = torch.tensor([correct / total], device=device)
    dist.all_reduce(acc)  # expect: DDP406
    return (acc / dist.get_world_size()).item()


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(train_set, test_set):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device(f"cuda:{local_rank}")
    net = SyncBatchNorm.convert_sync_batchnorm(torchvision.models.resnet50())
    model = DDP(net.to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 32, sampler=sampler)
    test_loader = DataLoader(test_set, 32)
    is_main = dist.get_rank() == 0
    for epoch in range(10):
        sampler.set_epoch(epoch)
        train_one_epoch(model, train_loader, optimizer, device)
        if is_main:
            print(evaluate(model, test_loader, device))  # expect: DDP211 DDP220
    dist.destroy_process_group()
