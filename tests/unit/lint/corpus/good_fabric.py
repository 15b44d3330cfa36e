# SPDX-License-Identifier: Apache-2.0
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader


def main(net, ds):
    fabric = Fabric(devices=2, strategy="ddp")
    fabric.launch()
    net, opt = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = fabric.setup_dataloaders(DataLoader(ds, 8, shuffle=True))
    for x, y in loader:
        loss = (net(x) - y).square().mean()
        fabric.backward(loss)
        opt.step()
        opt.zero_grad()
    fabric.save("x.ckpt", {"net": net})
    fabric.print("done")
