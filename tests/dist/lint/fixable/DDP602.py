# SPDX-License-Identifier: Apache-2.0
"""Names with a prefix in a checkpoint that a plain model loads."""

import torch
import torch.distributed as dist
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
    model = DDP(nn.Linear(4, 1))
    trains = fit(model, make_batches())
    path = f"{folder}/model.pt"
    if dist.get_rank() == 0:
        torch.save({"weights": model.state_dict(), "epoch": 20}, path)
    dist.barrier()
    plain = nn.Linear(4, 1)
    plain.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["weights"])
    return trains
