# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

BATCH_PER_GPU = 4


def main(ds, rank):
    dist.init_process_group("nccl")
    torch.cuda.set_device(rank)
    model = torchvision.models.resnet50().cuda(rank)
    model = DistributedDataParallel(model, device_ids=[rank])  # expect: DDP408
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=BATCH_PER_GPU, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.cuda(rank)), y.cuda(rank))
            loss.backward()
            opt.step()
            opt.zero_grad()
    dist.destroy_process_group()
