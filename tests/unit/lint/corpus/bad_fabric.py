# SPDX-License-Identifier: Apache-2.0
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader


def main(net, ds):
    fabric = Fabric(accelerator="cuda", devices=2, strategy="ddp")
    fabric.launch()
    opt = torch.optim.SGD(net.parameters(), 0.1)
    net, opt = fabric.setup(net, opt)
    loader = DataLoader(ds, 8, shuffle=True)  # expect: DDP401
    for x, y in loader:
        loss = (net(x) - y).square().mean()
        loss.backward()  # expect: DDP338
        opt.step()
        opt.zero_grad()
    if fabric.global_rank == 0:
        fabric.save("x.ckpt", {"net": net})  # expect: DDP220
        fabric.barrier()  # expect: DDP220


if __name__ == "__main__":
    main(torch.nn.Linear(4, 1), [])
