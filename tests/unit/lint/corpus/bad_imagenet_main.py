# SPDX-License-Identifier: Apache-2.0
"""Train a classifier in the manner of the ImageNet example."""

import argparse
import os
import shutil
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.parallel
import torch.utils.data
import torch.utils.data.distributed
import torchvision.datasets as datasets
import torchvision.models as models
import torchvision.transforms as transforms

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--arch", default="resnet18")
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("--resume", default="")
parser.add_argument("--dist-url", default="tcp://127.0.0.1:9876")
best_acc1 = 0


def main():
    args = parser.parse_args()
    ngpus = torch.cuda.device_count()
    mp.spawn(main_worker, nprocs=ngpus, args=(ngpus, args))


def main_worker(gpu, ngpus, args):
    global best_acc1
    args.gpu = gpu
    dist.init_process_group("nccl", init_method=args.dist_url, world_size=ngpus, rank=gpu)
    model = models.__dict__[args.arch]()
    torch.cuda.set_device(args.gpu)
    model.cuda(args.gpu)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
    criterion = nn.CrossEntropyLoss().cuda(args.gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if args.resume:
        checkpoint = torch.load(args.resume)  # expect: DDP609 DDP610
        model.load_state_dict(checkpoint["state_dict"])
    train_dataset = datasets.ImageFolder(args.data, transforms.ToTensor())
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)  # expect: DDP402
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=64, shuffle=(train_sampler is None), num_workers=4, sampler=train_sampler
    )
    for epoch in range(args.epochs):
        acc1 = train(train_loader, model, criterion, optimizer, epoch, args)
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        save_checkpoint({"epoch": epoch + 1, "state_dict": model.module.state_dict()}, is_best)
    dist.destroy_process_group()


def train(loader, model, criterion, optimizer, epoch, args):
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images = images.cuda(args.gpu, non_blocking=True)
        target = target.cuda(args.gpu, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end = time.time()
    return 0.0


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)  # expect: DDP603
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


if __name__ == "__main__":
    main()
