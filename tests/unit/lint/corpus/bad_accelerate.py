# SPDX-License-Identifier: Apache-2.0
"""The loader stays out of prepare; a gather on the main process."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main(model, dataset):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(dataset, batch_size=8, shuffle=True)  # expect: DDP401
    model, optimizer = accelerator.prepare(model, optimizer)
    for epoch in range(2):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x.to(accelerator.device)), y.to(accelerator.device))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            print(accelerator.gather(loss).mean())  # expect: DDP220
    if accelerator.is_local_main_process:
        torch.save(model.state_dict(), "model.pt")  # expect: DDP602


if __name__ == "__main__":
    main(torch.nn.Linear(2, 1), [])
