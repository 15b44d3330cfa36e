# SPDX-License-Identifier: Apache-2.0
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main(net, ds, k=4):
    acc = Accelerator(gradient_accumulation_steps=k)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    net, opt, loader = acc.prepare(net, opt, DataLoader(ds, 8, shuffle=True))
    for epoch in range(3):
        for x, y in loader:
            with acc.accumulate(net):
                loss = (net(x) - y).square().mean()
                acc.backward(loss)
                opt.step()
                opt.zero_grad()
        mean = acc.gather(loss).mean()
        acc.print(epoch, mean.item())
        acc.wait_for_everyone()
        acc.save_state(f"ckpt/{epoch}")
        if acc.is_main_process:
            acc.save(acc.unwrap_model(net).state_dict(), "x.pt")
            torch.save(acc.get_state_dict(net), "y.pt")
    acc.unwrap_model(net).save_pretrained("out", is_main_process=acc.is_main_process, save_function=acc.save)
