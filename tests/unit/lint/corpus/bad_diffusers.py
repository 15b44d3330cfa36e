# SPDX-License-Identifier: Apache-2.0
import argparse
import os
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.utils.data import DataLoader

logger = get_logger(__name__)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=-1)
    p.add_argument("--train_batch_size", type=int, default=4)
    p.add_argument("--gradient_accumulation_steps", type=int, default=4)
    return p.parse_args()


def main(unet, dataset, noise_scheduler):
    args = parse_args()
    accelerator = Accelerator(mixed_precision="fp16")
    optimizer = torch.optim.AdamW(unet.parameters())
    dataloader = DataLoader(dataset, batch_size=args.train_batch_size, shuffle=True)
    unet, optimizer, dataloader = accelerator.prepare(unet, optimizer, dataloader)
    for epoch in range(100):
        for step, batch in enumerate(dataloader):
            noise = torch.randn_like(batch)
            t = torch.randint(0, 1000, (len(batch),), device=batch.device)
            noisy = noise_scheduler.add_noise(batch, noise, t)
            loss = F.mse_loss(unet(noisy, t), noise)
            accelerator.backward(loss / args.gradient_accumulation_steps)  # expect: DDP505
            if (step + 1) % args.gradient_accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.is_main_process:
                avg = accelerator.gather(loss.detach()).mean()  # expect: DDP220
                logger.info("%s", avg)
        if accelerator.is_main_process:
            accelerator.wait_for_everyone()  # expect: DDP220
            torch.save(unet.state_dict(), os.path.join("out", f"{epoch}.bin"))  # expect: DDP602
    torch.save(accelerator.unwrap_model(unet).state_dict(), "final.bin")  # expect: DDP603


if __name__ == "__main__":
    main(None, None, None)
