# SPDX-License-Identifier: Apache-2.0
import math
import os
from contextlib import nullcontext

import numpy as np
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig

gradient_accumulation_steps = 40
batch_size, block_size = 12, 1024
eval_interval, max_iters = 2000, 600000
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="nccl")
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{ddp_local_rank}"
    torch.cuda.set_device(device)
    master_process = ddp_rank == 0
else:
    master_process = True
    device = "cuda"
torch.manual_seed(1337)
data = np.memmap("train.bin", dtype=np.uint16, mode="r")


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))  # expect: DDP407
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


model = GPT(GPTConfig())
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
scaler = torch.cuda.amp.GradScaler()  # expect: DDP336
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])
raw = model.module if ddp else model
X, Y = get_batch()
for iter_num in range(max_iters):
    if iter_num % eval_interval == 0 and master_process:
        torch.save({"model": raw.state_dict(), "iter": iter_num}, "ckpt.pt")
    for micro in range(gradient_accumulation_steps):
        with torch.amp.autocast("cuda"):
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()  # expect: DDP505
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: DDP335
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    destroy_process_group()
