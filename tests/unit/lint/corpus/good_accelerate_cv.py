# SPDX-License-Identifier: Apache-2.0
import os
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader


def training_function(config, net, train, val):
    accelerator = Accelerator(log_with="tensorboard", project_dir="logs")
    set_seed(config["seed"], device_specific=True)
    opt = torch.optim.Adam(net.parameters(), lr=config["lr"])
    train_dl = DataLoader(train, shuffle=True, batch_size=16)
    eval_dl = DataLoader(val, batch_size=32)
    net, opt, train_dl, eval_dl = accelerator.prepare(net, opt, train_dl, eval_dl)
    for epoch in range(3):
        net.train()
        total = 0
        for batch in train_dl:
            loss = torch.nn.functional.cross_entropy(net(batch["x"]), batch["y"])
            total += loss.detach().float()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        net.eval()
        right = n = 0
        for batch in eval_dl:
            with torch.no_grad():
                pred = net(batch["x"]).argmax(-1)
            pred, ref = accelerator.gather_for_metrics((pred, batch["y"]))
            right += (pred == ref).sum()
            n += len(ref)
        accelerator.print(f"epoch {epoch}: {100 * right / n:.2f}")
        accelerator.save_state(os.path.join("out", str(epoch)))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = accelerator.unwrap_model(net).state_dict()
        torch.save(state, "final.pt")
    accelerator.end_training()


if __name__ == "__main__":
    training_function({"seed": 1, "lr": 1e-3}, None, [], [])
