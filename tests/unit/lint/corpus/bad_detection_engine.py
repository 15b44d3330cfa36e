# SPDX-License-Identifier: Apache-2.0
import math
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def is_dist():
    return dist.is_available() and dist.is_initialized()


def get_rank():
    return dist.get_rank() if is_dist() else 0


def reduce_dict(input_dict):
    with torch.no_grad():
        names = sorted(input_dict.keys())
        values = torch.stack([input_dict[k] for k in names])
        dist.all_reduce(values)
        values /= dist.get_world_size()
        return dict(zip(names, values))


def train_one_epoch(model, optimizer, data_loader, device, epoch):
    model.train()
    for images, targets in data_loader:
        loss_dict = model([i.to(device) for i in images], targets)
        losses = sum(loss_dict.values())
        if not math.isfinite(losses.item()):
            print("skipping a batch")
            optimizer.zero_grad()
            continue  # expect: DDP210
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if get_rank() == 0:
            print(epoch, reduce_dict(loss_dict))  # expect: DDP220


def evaluate(model, loader, device):
    if get_rank() > 0:
        return
    for images, _ in loader:
        model([i.to(device) for i in images])  # expect: DDP208


def main(model, loaders, device):
    dist.init_process_group("nccl")  # expect: DDP605
    torch.cuda.set_device(device)
    model = DistributedDataParallel(model.to(device), device_ids=[device])
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for epoch in range(12):
        train_one_epoch(model, optimizer, loaders["train"], device, epoch)
        evaluate(model, loaders["val"], device)


if __name__ == "__main__":
    main(None, {}, int(sys.argv[1]))
