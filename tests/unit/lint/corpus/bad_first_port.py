# SPDX-License-Identifier: Apache-2.0
"""A single-GPU script ported in a hurry."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 3)
        self.fc = nn.Linear(32 * 26 * 26, 10)

    def forward(self, x):
        x = F.relu(self.conv(x))
        return self.fc(torch.flatten(x, 1))


def train(model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 10 == 0:
            print(f"Train Epoch: {epoch} Loss: {loss.item():.6f}")  # expect: DDP411


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=14)
    args = parser.parse_args()
    dist.init_process_group("nccl")  # expect: DDP605
    device = torch.device("cuda:0")  # expect: DDP118
    dataset = datasets.MNIST("data", train=True, transform=transforms.ToTensor())
    loader = DataLoader(dataset, batch_size=64, shuffle=True)  # expect: DDP401
    model = DDP(Net())
    model.to(device)  # expect: DDP331
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        train(model, device, loader, optimizer, epoch)
    torch.save(model.state_dict(), "mnist.pt")  # expect: DDP602 DDP603


if __name__ == "__main__":
    main()
