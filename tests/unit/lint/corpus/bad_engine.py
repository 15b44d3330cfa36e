# SPDX-License-Identifier: Apache-2.0
import torch
from torch import distributed as D
from torch.cuda import amp
from torch.nn.parallel import DistributedDataParallel as Parallel


class Engine:
    def __init__(self, cfg, model, loaders):
        D.init_process_group(cfg.backend)
        self.rank = D.get_rank()
        self.master = self.rank == 0
        self.model = Parallel(model.cuda(), find_unused_parameters=True)  # expect: DDP118
        self.optim = torch.optim.Adam(self.model.parameters())
        self.scaler = amp.GradScaler()  # expect: DDP336
        self.loaders = loaders
        self.grad_accum = cfg.accum

    def train_step(self, i, batch):
        with amp.autocast():  # expect: DDP336
            loss = self.model(batch["x"]).mean() / self.grad_accum
        self.scaler.scale(loss).backward()  # expect: DDP505
        if (i + 1) % self.grad_accum == 0:
            nn_utils = torch.nn.utils
            nn_utils.clip_grad_norm_(self.model.parameters(), 1.0)  # expect: DDP335
            self.scaler.step(self.optim)
            self.scaler.update()
            self.optim.zero_grad()
        return loss.item()

    def fit(self, epochs):
        for e in range(epochs):
            for i, b in enumerate(self.loaders["train"]):
                l = self.train_step(i, b)
            if self.master:
                self.validate()  # expect: DDP220
            self.save(e)

    def validate(self):
        tot = torch.zeros(1).cuda()
        for b in self.loaders["val"]:
            with torch.no_grad():
                tot += self.model.module(b["x"]).mean()
        D.all_reduce(tot)
        return tot

    def save(self, e):
        if not self.master:
            return
        torch.save({"m": self.model.state_dict()}, f"{e}.pt")  # expect: DDP602
        D.barrier()  # expect: DDP208

    def load(self, path):
        self.model.module.load_state_dict(torch.load(path)["m"])  # expect: DDP609 DDP610
