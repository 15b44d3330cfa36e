# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations
import logging
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger(__name__)


def reduce_dict(d):
    keys = sorted(d)
    v = torch.stack([d[k] for k in keys])
    dist.all_reduce(v)
    return dict(zip(keys, v / dist.get_world_size()))


@torch.no_grad()
def validate(net, batches):
    net.eval()
    return {"loss": torch.stack([net(x).mean() for x in batches]).mean()}


def loop(net: DDP, train, val, opt, rank: int, epochs: int):
    for e in range(epochs):
        for x in train:
            losses = {"a": net(x).mean()}
            losses["a"].backward()
            opt.step()
            opt.zero_grad()
            if rank == 0 and e % 10 == 0:
                shown = reduce_dict(losses)  # expect: DDP220
                log.info("%s", shown)
        if dist.get_rank() == 0:
            metrics = validate(net, val)  # expect: DDP211
            log.info("%s", metrics)
        try:
            dist.barrier()
        except RuntimeError:
            dist.barrier()  # expect: DDP210


def main(net, train, val):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = DDP(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    try:
        loop(net, train, val, opt, rank, 3)
    finally:
        dist.all_reduce(torch.ones(1))  # expect: DDP210
        dist.destroy_process_group()
