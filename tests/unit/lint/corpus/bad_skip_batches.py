# SPDX-License-Identifier: Apache-2.0
"""Errors of one rank are swallowed; a barrier waits in a finally."""

import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger(__name__)


class Runner:
    def __init__(self, net, loader, opt):
        self.net = DistributedDataParallel(net.cuda())
        self.loader = loader
        self.opt = opt

    def step(self, batch):
        self.opt.zero_grad()
        out = self.net(batch["x"].cuda())
        loss = (out - batch["y"].cuda()).pow(2).mean()
        loss.backward()
        self.opt.step()

    def run(self):
        try:
            for batch in self.loader:
                try:
                    self.step(batch)
                except torch.cuda.OutOfMemoryError:  # expect: DDP210
                    log.warning("skipped a batch")
                    torch.cuda.empty_cache()
        finally:
            dist.barrier()  # expect: DDP210


def main(net, loader, opt, local_rank):
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    Runner(net, loader, opt).run()
    dist.destroy_process_group()
