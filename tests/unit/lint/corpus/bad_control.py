# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Coach:
    def __init__(self, model, patience):
        self.rank = dist.get_rank()
        self.main = self.rank == 0
        self.model = DistributedDataParallel(model)
        self.optim = torch.optim.SGD(self.model.parameters(), 0.1)
        self.best = 1e9
        self.patience = patience
        self.bad = 0

    def should_stop(self, value):
        if self.main:
            self.bad = 0 if value < self.best else self.bad + 1
            self.best = min(self.best, value)
            return self.bad > self.patience
        return False

    def gather(self, t):
        parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, t)
        return torch.cat(parts)

    def log_outputs(self, out):
        if not self.main:
            return None
        return self.gather(out).mean()  # expect: DDP208

    def fit(self, loader, epochs):
        for _ in range(epochs):
            for x in loader:
                out = self.model(x)
                loss = out.mean()
                try:
                    loss.backward()
                except RuntimeError:  # expect: DDP210
                    self.optim.zero_grad()
                    continue
                self.optim.step()
                self.optim.zero_grad()
            if self.main and loss.item() < 0.1:
                break  # expect: DDP208


def main(model, loader):
    dist.init_process_group("gloo")
    Coach(model, 3).fit(loader, 10)
    dist.destroy_process_group()
