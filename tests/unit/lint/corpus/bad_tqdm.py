# SPDX-License-Identifier: Apache-2.0
import os, random
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def augment(x):
    return x + 0.1 * torch.randn(x.shape)  # expect: DDP407


def main(net, loader):
    dist.init_process_group("gloo")
    set_seed(42)
    net = DDP(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    bar = tqdm(loader)
    for x, y in bar:
        loss = (net(augment(x)) - y).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        tqdm.write(f"{loss.item():.4f}")  # expect: DDP411
    dist.destroy_process_group()
