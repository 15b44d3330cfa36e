# SPDX-License-Identifier: Apache-2.0
"""Noise from a generator of the rank's own."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def set_seed(seed):
    torch.manual_seed(seed)


def main(args, dataset, net):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    set_seed(args.seed)
    device = torch.device("cuda", local_rank)
    model = DDP(net.to(device), device_ids=[local_rank])
    generator = torch.Generator(device).manual_seed(args.seed + dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, _ in loader:
            x = x.to(device)
            noise = torch.randn(x.shape, device=device, generator=generator)
            loss = (model(x + noise) - noise).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()
