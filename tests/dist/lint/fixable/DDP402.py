# SPDX-License-Identifier: Apache-2.0
"""Every epoch has the same order."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(folder):
    x = torch.arange(64.0).reshape(16, 4) / 64
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    orders = []
    for epoch in range(3):
        # one epoch
        order = []
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            order.append(x[:, 0].tolist())
        orders.append(order)
    return orders[0] != orders[1]
