# SPDX-License-Identifier: Apache-2.0
import argparse
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torchvision
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def setup(args):
    args.rank = int(os.environ["RANK"])
    args.gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(args.gpu)
    dist.init_process_group(backend="nccl", init_method="env://")
    dist.barrier()


class AverageMeter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, v, n):
        self.total += v * n
        self.count += n

    def synchronize(self):
        t = torch.tensor([self.total, self.count], device="cuda")
        dist.barrier()
        dist.all_reduce(t)
        self.total, self.count = t.tolist()

    @property
    def avg(self):
        return self.total / self.count


def save_on_master(*args, **kwargs):
    if dist.get_rank() == 0:
        torch.save(*args, **kwargs)


def evaluate(model, loader):
    meter = AverageMeter()
    model.eval()
    with torch.inference_mode():
        for x, y in loader:
            out = model(x.cuda(non_blocking=True))
            meter.update((out.argmax(1).cpu() == y).float().mean().item(), len(y))
    meter.synchronize()
    return meter.avg


def main(args):
    setup(args)
    ds = torchvision.datasets.FakeData(transform=torchvision.transforms.ToTensor())
    val = torchvision.datasets.FakeData(transform=torchvision.transforms.ToTensor())
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, args.batch_size, sampler=sampler, num_workers=4, pin_memory=True)
    val_loader = DataLoader(val, args.batch_size, sampler=DistributedSampler(val, shuffle=False))
    model = torchvision.models.resnet18()
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to("cuda")
    model = nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
    without = model.module
    opt = torch.optim.SGD(model.parameters(), args.lr * dist.get_world_size())
    if args.resume:
        ck = torch.load(args.resume, map_location="cpu", weights_only=True)
        without.load_state_dict(ck["model"])
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % 50 == 0 and args.rank == 0:
                print(epoch, i, loss.item())
        acc = evaluate(model, val_loader)
        if args.rank == 0:
            print(acc)
        save_on_master({"model": without.state_dict()}, f"model_{epoch}.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--sync-bn", action="store_true")
    p.add_argument("--resume")
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--epochs", type=int, default=3)
    main(p.parse_args())
