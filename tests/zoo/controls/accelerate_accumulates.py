# SPDX-License-Identifier: Apache-2.0
"""Accelerate accumulates four batches, and gathers for its metric."""

import torch

try:
    from accelerate import Accelerator
except ImportError:
    raise SystemExit(0) from None

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(75, 6), torch.randn(75, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(3):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        seen = [accelerator.gather_for_metrics((model(x) - y).square()) for x, y in loader]
    assert sum(map(len, seen)) == len(data)
accelerator.end_training()
