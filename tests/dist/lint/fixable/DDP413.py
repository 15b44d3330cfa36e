# SPDX-License-Identifier: Apache-2.0
"""A sampler and `shuffle=True`, which DataLoader refuses."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def fit(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for epoch in range(20):
        for x, y in batches:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses[-1] < losses[0]


def main(folder):
    x = torch.randn(64, 4)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(dataset, shuffle=True, batch_size=8, sampler=DistributedSampler(dataset, shuffle=False))
    return fit(DDP(nn.Linear(4, 1)), loader)
