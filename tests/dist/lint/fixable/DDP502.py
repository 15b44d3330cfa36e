# SPDX-License-Identifier: Apache-2.0
"""A search for unused parameters that finds none."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def make_batches():
    x = torch.randn(32, 4)
    return [(x, x.sum(1, keepdim=True))]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(x)


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
    model = DDP(
        Net(),
        find_unused_parameters=True,  # to be safe
        gradient_as_bucket_view=True,
    )
    return fit(model, make_batches())
