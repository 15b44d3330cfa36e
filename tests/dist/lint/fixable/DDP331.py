# SPDX-License-Identifier: Apache-2.0
"""A model is moved after it is wrapped, with a comment behind it."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def make_batches():
    x = torch.randn(32, 4)
    return [(x, x.sum(1, keepdim=True))]


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
    model = DDP(nn.Linear(4, 1)).to(torch.device("cpu"))  # to the device
    return fit(model, make_batches())
