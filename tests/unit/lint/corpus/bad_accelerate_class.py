# SPDX-License-Identifier: Apache-2.0
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


class Fitter:
    def __init__(self, net, ds):
        self.acc = Accelerator(mixed_precision="fp16")
        self.opt = torch.optim.AdamW(net.parameters())
        loader = DataLoader(ds, batch_size=8, shuffle=True)  # expect: DDP401
        self.net, self.opt = self.acc.prepare(net, self.opt)
        self.loader = loader

    def train(self):
        for step, (x, y) in enumerate(self.loader):
            loss = (self.net(x.to("cuda:0")) - y).square().mean()  # expect: DDP118
            loss.backward()  # expect: DDP338
            self.opt.step()
            self.opt.zero_grad()
            if self.acc.is_local_main_process:
                total = self.acc.reduce(loss)  # expect: DDP220
                self.acc.print(total)

    def save(self):
        torch.save(self.acc.unwrap_model(self.net).state_dict(), "net.pt")  # expect: DDP603


def main(net, ds):
    f = Fitter(net, ds)
    f.train()
    f.save()
