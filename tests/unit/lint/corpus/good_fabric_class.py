# SPDX-License-Identifier: Apache-2.0
import lightning as L
import torch
from torch.utils.data import DataLoader


class Run:
    def __init__(self, net, ds):
        self.fabric = L.Fabric(accelerator="auto", devices=2)
        self.fabric.launch()
        self.fabric.seed_everything(3 + self.fabric.global_rank)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        self.net, self.opt = self.fabric.setup(net, opt)
        self.loader = self.fabric.setup_dataloaders(DataLoader(ds, 8, shuffle=True))

    def go(self, k=4):
        for i, x in enumerate(self.loader):
            busy = (i + 1) % k != 0
            with self.fabric.no_backward_sync(self.net, enabled=busy):
                loss = self.net(x).mean()
                self.fabric.backward(loss / k)
            if not busy:
                self.opt.step()
                self.opt.zero_grad()
        mean = self.fabric.all_reduce(loss)
        if self.fabric.is_global_zero:
            print(mean)
        self.fabric.save("x.ckpt", {"net": self.net})


if __name__ == "__main__":
    Run(torch.nn.Linear(1, 1), []).go()
