# SPDX-License-Identifier: Apache-2.0
"""A bfloat16 model, and one that computes under autocast."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
for dtype in (torch.bfloat16, torch.float32):
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)).to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    for step in range(20):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = model(torch.randn(8, 4, dtype=dtype)).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
