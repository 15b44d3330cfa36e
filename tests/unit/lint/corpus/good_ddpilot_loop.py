# SPDX-License-Identifier: Apache-2.0
"""A training loop with ddpilot's Loop, which divides data and reduces numbers itself."""

import torch
from torch.utils.data import DataLoader

import ddpilot


def train(dataset, epochs):
    loop = ddpilot.Loop()
    model = loop.prepare(torch.nn.Linear(4, 1))
    optimizer = loop.prepare(torch.optim.SGD(model.parameters(), 0.1))
    loader = loop.loader(dataset, batch_size=32, shuffle=True)
    for epoch in loop.epochs(epochs):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            loop.update(loss)
            print(loop.reduce(loss.detach()).item())
    return model


if __name__ == "__main__":
    ddpilot.launch(train, torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), 3, nproc_per_node=2)
    for batch in DataLoader([1, 2, 3], batch_size=1, shuffle=True):
        print(batch)
