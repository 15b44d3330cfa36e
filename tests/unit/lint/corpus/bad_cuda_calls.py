# SPDX-License-Identifier: Apache-2.0
import os
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Experiment:
    def __init__(self, data):
        self.criterion = nn.CrossEntropyLoss().cuda()  # expect: DDP119
        self.setup()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=32, sampler=self.sampler, pin_memory=True)
        self.net = DDP(nn.Linear(8, 4).cuda(self.gpu), device_ids=[self.gpu])
        self.opt = torch.optim.AdamW(self.net.parameters())

    def setup(self):
        self.gpu = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.gpu)
        dist.init_process_group("nccl")  # expect: DDP605

    def epoch(self, n):
        self.sampler.set_epoch(n)
        for x, y in self.loader:
            loss = self.criterion(self.net(x.cuda()), y.cuda())
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            print("loss:", loss.item())  # expect: DDP411


if __name__ == "__main__":
    e = Experiment(torch.utils.data.TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long)))
    for i in range(10):
        e.epoch(i)
