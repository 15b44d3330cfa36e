# SPDX-License-Identifier: Apache-2.0
"""Best accuracy decided per rank, a helper that saves everywhere, weights loaded to GPU 0."""

import os
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)  # expect: DDP603
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def main_worker(gpu, ngpus, args, train_set, val_set):
    dist.init_process_group("nccl", init_method=args.dist_url, world_size=ngpus, rank=gpu)
    torch.cuda.set_device(gpu)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).cuda(gpu)
    if args.resume:
        checkpoint = torch.load(args.resume)  # expect: DDP609 DDP610
        model.load_state_dict(checkpoint["state_dict"])
    model = DDP(model, device_ids=[gpu])
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    train_sampler = DistributedSampler(train_set)  # expect: DDP402
    train_loader = DataLoader(train_set, args.batch_size, shuffle=(train_sampler is None), sampler=train_sampler)
    val_loader = DataLoader(val_set, args.batch_size, shuffle=False)
    best = 0
    for epoch in range(args.start_epoch, args.epochs):
        train(train_loader, model, optimizer, gpu)
        acc = validate(val_loader, model, gpu)
        checkpoint = {"state_dict": model.state_dict(), "best": best}  # expect: DDP602
        save_checkpoint(checkpoint, acc > best)
        best = max(acc, best)
    dist.destroy_process_group()


def train(loader, model, optimizer, gpu):
    model.train()
    for i, (images, target) in enumerate(loader):
        output = model(images.cuda(gpu, non_blocking=True))
        loss = nn.functional.cross_entropy(output, target.cuda(gpu))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            print("loss", loss.item(), "acc", accuracy(output, target.cuda(gpu)))  # expect: DDP411


def validate(loader, model, gpu):
    model.eval()
    with torch.no_grad():
        accs = [accuracy(model(images.cuda(gpu)), target.cuda(gpu)).item() for images, target in loader]
    return sum(accs) / len(accs)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main_worker, nprocs=torch.cuda.device_count(), args=(2, os.environ, None, None))
