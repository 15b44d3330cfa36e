# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn
from torch.nn.parallel import DataParallel as Wrap


def get_model(cfg):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    if torch.cuda.device_count() > 1:
        net = Wrap(net)  # expect: DDP330
    return net.cuda()


class Trainer:
    def __init__(self, cfg):
        self.model = get_model(cfg)
        self.head = nn.parallel.DataParallel(nn.Linear(8, 10).cuda())  # expect: DDP330
        self.opt = torch.optim.SGD(self.model.parameters(), 0.1)

    def step(self, x, y):
        self.opt.zero_grad()
        loss = nn.functional.cross_entropy(self.head(self.model(x).mean((2, 3))), y)
        loss.backward()
        self.opt.step()


if __name__ == "__main__":
    Trainer({}).step(torch.randn(4, 3, 8, 8).cuda(), torch.zeros(4, dtype=torch.long).cuda())
