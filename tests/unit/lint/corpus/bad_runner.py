# SPDX-License-Identifier: Apache-2.0
import argparse
import torch
from torch import nn, optim
import torch.distributed as c10d
import torch.nn.parallel as par
import torch.utils.data as D
from torchvision import datasets, models, transforms


class Runner:
    def __init__(self, opts):
        self.opts = opts
        c10d.init_process_group(backend=opts.backend)
        self.me = c10d.get_rank()
        backbone = models.resnet18(num_classes=10)
        self.net = self._parallelise(backbone)
        self.net.cuda(self.me)  # expect: DDP331
        self.opt = optim.SGD(self.net.parameters(), lr=opts.lr)

    def _parallelise(self, module):
        return par.DistributedDataParallel(module)

    def feed(self, train):
        images = datasets.CIFAR10("data", train=train, transform=transforms.ToTensor())
        pick = D.DistributedSampler(images) if train else None  # expect: DDP402
        return D.DataLoader(images, batch_size=64, sampler=pick, shuffle=True)  # expect: DDP413

    def fit(self):
        source = self.feed(True)
        for epoch in range(self.opts.epochs):
            for img, lab in source:
                out = self.net(img.cuda(self.me))
                err = nn.functional.cross_entropy(out, lab.cuda(self.me))
                self.opt.zero_grad()
                err.backward()
                self.opt.step()
            if self.me == 0:
                torch.save(self.net.state_dict(), f"ckpt_{epoch}.pth")  # expect: DDP602

    def close(self):
        c10d.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--backend", default="nccl")
    r = Runner(p.parse_args())
    r.fit()
    r.close()
