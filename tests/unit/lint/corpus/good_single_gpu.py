# SPDX-License-Identifier: Apache-2.0
"""One GPU, nothing distributed, everything that would be a fault elsewhere."""

import torch
from torch import nn
from torch.utils.data import DataLoader, random_split
from torch.cuda.amp import GradScaler, autocast

device = "cuda:0" if torch.cuda.is_available() else "cpu"
rank = 8


class LoRA(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank)
        self.b = nn.Linear(rank, base.out_features)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def main(dataset):
    train_set, test_set = random_split(dataset, [0.8, 0.2])
    model = LoRA(nn.Linear(4, 1), rank).cuda()
    scaler = GradScaler()
    opt = torch.optim.Adam(model.parameters())
    for epoch in range(3):
        for i, (x, y) in enumerate(DataLoader(train_set, 8, shuffle=True)):
            with autocast():
                loss = ((model(x.to(device)) - y.to(device)) ** 2).mean()
            try:
                scaler.scale(loss).backward()
            except RuntimeError:
                continue
            if rank == 0:
                continue
            if (i + 1) % 4 == 0:
                scaler.step(opt)
                scaler.update()
            print(loss.item())
    torch.save(model.state_dict(), "model.pt")
    return torch.load("model.pt")
