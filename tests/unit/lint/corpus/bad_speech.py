# SPDX-License-Identifier: Apache-2.0
import logging
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as DS


class Solver:
    def __init__(self, cfg, model, datasets):
        self.rank = cfg.rank
        self.device = torch.device("cuda:0")  # expect: DDP118
        model.to(self.device)
        self.dmodel = DDP(model, find_unused_parameters=cfg.unused)
        self.optimizer = torch.optim.Adam(model.parameters())
        self.tr = DataLoader(datasets["tr"], batch_size=cfg.batch, shuffle=True)  # expect: DDP401
        self.cv = DataLoader(datasets["cv"], batch_size=1, sampler=DS(datasets["cv"], shuffle=False))
        self.best = None

    def _serialize(self):
        package = {"model": self.dmodel.state_dict(), "best": self.best}  # expect: DDP602
        tmp = "checkpoint.th.tmp"
        torch.save(package, tmp)
        os.rename(tmp, "checkpoint.th")

    def train(self, epochs):
        for epoch in range(epochs):
            self._run(self.tr, epoch)
            with torch.no_grad():
                loss = self._run(self.cv, epoch, train=False)
            if self.rank == 0:
                self._serialize()

    def _run(self, loader, epoch, train=True):
        total, count = 0.0, 0
        for i, (noisy, clean) in enumerate(loader):
            est = self.dmodel(noisy.to(self.device))
            loss = (est - clean.to(self.device)).abs().mean()
            if train:
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            total += loss.item() * len(noisy)
            count += len(noisy)
            print(f"epoch {epoch} batch {i} loss {loss.item()}")  # expect: DDP411
        mean = torch.tensor(total / count, device=self.device)
        dist.all_reduce(mean)  # expect: DDP406
        return mean / dist.get_world_size()


def run(cfg, model, datasets):
    dist.init_process_group("nccl", rank=cfg.rank, world_size=cfg.world)
    Solver(cfg, model, datasets).train(10)
    dist.destroy_process_group()
