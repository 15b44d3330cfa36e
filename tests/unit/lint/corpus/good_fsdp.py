# SPDX-License-Identifier: Apache-2.0
"""Fully sharded, saved by torch.distributed.checkpoint on all ranks."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def main(net, dataset):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = fully_shard(net.cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = DistributedSampler(dataset)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in DataLoader(dataset, 4, sampler=sampler):
            loss = model(x.cuda()).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dcp.save({"model": model.state_dict()}, checkpoint_id="run")
    dist.destroy_process_group()
