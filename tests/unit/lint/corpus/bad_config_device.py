# SPDX-License-Identifier: Apache-2.0
"""A device from a configuration object; seeds from it; two models of which one is moved too late."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.utils.data as data
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    batch_size: int = 12
    device: str = "cuda:0"  # expect: DDP118
    seed: int = 0


def main(cfg: Config, dataset, student, teacher):
    dist.init_process_group("nccl")
    torch.manual_seed(cfg.seed)
    student = DDP(student.to(cfg.device))
    teacher = DDP(teacher, broadcast_buffers=False)
    teacher = teacher.to(cfg.device)  # expect: DDP331
    sampler = data.DistributedSampler(dataset, shuffle=True)
    loader = data.DataLoader(dataset, cfg.batch_size, sampler=sampler)
    optimizer = torch.optim.Adam(student.parameters())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x in loader:
            x = x.to(cfg.device)
            mask = torch.rand(x.shape, device=x.device) < 0.15  # expect: DDP407
            with torch.no_grad():
                target = teacher(x)
            loss = ((student(x * mask) - target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()
