# SPDX-License-Identifier: Apache-2.0
"""A script with a fault of each kind that `ddpilot lint --fix` mends; it runs once they are, on CPUs and GPUs."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATH = os.environ["CHECKPOINT"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def resume(net):
    # To the GPU that saved it, without `map_location`: cuda:0.
    net.load_state_dict(torch.load(PATH, weights_only=True))
    return net


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = torch.randn(64, 4)
    dataset = TensorDataset(rows, rows.sum(1, keepdim=True))
    model = DDP(Net(), find_unused_parameters=True).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=sampler,
        shuffle=True,  # refused by DataLoader
    )
    losses = []
    for epoch in range(20):
        for x, y in loader:
            with torch.cuda.amp.autocast(enabled=False):
                loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        torch.save(model.state_dict(), PATH)
    dist.barrier()
    resume(Net())
    print(f"rank {rank} trained: {losses[-1] < losses[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
