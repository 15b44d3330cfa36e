# SPDX-License-Identifier: Apache-2.0
import lightning as L
import torch
from torch.utils.data import DataLoader, RandomSampler


class LM:
    def __init__(self, ds, net):
        self.fabric = L.Fabric(devices=4, accelerator="cuda")
        self.fabric.launch()
        self.net, self.opt = self.fabric.setup(net, torch.optim.AdamW(net.parameters()))
        self.train = DataLoader(ds, 8, sampler=RandomSampler(ds))  # expect: DDP401

    def run(self):
        for x in self.train:
            loss = self.net(x).mean()
            loss.backward()  # expect: DDP338
            self.opt.step()
            self.opt.zero_grad()
        if self.fabric.is_global_zero:
            self.fabric.all_reduce(loss)  # expect: DDP220


if __name__ == "__main__":
    LM([], torch.nn.Linear(1, 1)).run()
