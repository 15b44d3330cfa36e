# SPDX-License-Identifier: Apache-2.0
"""torchvision's references: helpers of another file do what is distributed."""

import datetime
import time

import torch
import utils
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler


def train_one_epoch(model, optimizer, data_loader, device, epoch, print_freq):
    metric_logger = utils.MetricLogger(delimiter="  ")
    for images, targets in metric_logger.log_every(data_loader, print_freq, f"Epoch: [{epoch}]"):
        images = [image.to(device) for image in images]
        losses = sum(model(images, targets).values())
        loss_value = utils.reduce_dict({"loss": losses})["loss"].item()
        if loss_value != loss_value:
            raise SystemExit(f"Loss is {loss_value}, stopping training")
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()


def main(args, dataset, model):
    utils.init_distributed_mode(args)
    device = torch.device(args.device)
    train_sampler = DistributedSampler(dataset) if args.distributed else RandomSampler(dataset)
    data_loader = DataLoader(dataset, batch_size=2, sampler=train_sampler, collate_fn=utils.collate_fn)
    model.to(device)
    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        model_without_ddp = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model_without_ddp.load_state_dict(checkpoint["model"])
    start = time.time()
    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, data_loader, device, epoch, args.print_freq)
        if args.output_dir:
            utils.save_on_master({"model": model_without_ddp.state_dict(), "epoch": epoch}, "model.pth")
    print(f"Training time {datetime.timedelta(seconds=int(time.time() - start))}")
