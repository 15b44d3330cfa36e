# SPDX-License-Identifier: Apache-2.0
import torch
import accelerate
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(net, ds, k=4):
    accelerator = accelerate.Accelerator()
    device = accelerator.device
    opt = torch.optim.SGD(net.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(ds, 8)
    net = DistributedDataParallel(net.to(device))
    net, opt, loader = accelerator.prepare(net, opt, loader)  # expect: DDP337
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(net(x), y) / k
            accelerator.backward(loss)  # expect: DDP505
            if (i + 1) % k == 0:
                opt.step()
                opt.zero_grad()
            print(epoch, i, loss.item())  # expect: DDP411
        if accelerator.is_main_process:
            accelerator.save_state(f"ckpt/{epoch}")
