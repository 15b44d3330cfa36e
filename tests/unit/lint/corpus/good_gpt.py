# SPDX-License-Identifier: Apache-2.0
import os
from contextlib import nullcontext
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from model import GPT, GPTConfig

ddp = int(os.environ.get("RANK", -1)) != -1
accum = 40
if ddp:
    dist.init_process_group("nccl")
    rank, local, world = (int(os.environ[k]) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = f"cuda:{local}"
    torch.cuda.set_device(device)
    master, offset = rank == 0, rank
    accum //= world
else:
    master, offset, device, world = True, 0, "cuda", 1
torch.manual_seed(1337 + offset)
data = np.memmap("train.bin", dtype=np.uint16, mode="r")


def get_batch():
    ix = torch.randint(len(data) - 64, (12,))
    return torch.stack([torch.from_numpy(data[i : i + 64].astype(np.int64)) for i in ix]).to(device)


model = GPT(GPTConfig()).to(device)
opt = torch.optim.AdamW(model.parameters(), lr=6e-4)
scaler = torch.amp.GradScaler("cuda", enabled=True)
if ddp:
    model = DDP(model, device_ids=[local])
raw = model.module if ddp else model
x = get_batch()
for it in range(1000):
    if it % 100 == 0 and master:
        raw.eval()
        with torch.no_grad():
            print(it, raw(x)[1].item())
        raw.train()
        torch.save({"model": raw.state_dict()}, "ckpt.pt")
    for micro in range(accum):
        if ddp:
            model.require_backward_grad_sync = micro == accum - 1
        with torch.autocast("cuda"):
            _, loss = model(x)
            loss = loss / accum
        x = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    if master and it % 10 == 0:
        print(f"iter {it}: loss {loss.item() * accum:.4f}")
if ddp:
    dist.destroy_process_group()
