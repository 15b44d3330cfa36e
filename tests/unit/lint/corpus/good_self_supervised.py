# SPDX-License-Identifier: Apache-2.0
"""A momentum encoder: the wrapper trains, a copy of its module is averaged."""

import copy
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main(args, dataset, net):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank, args.gpu = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    elif torch.cuda.is_available():
        args.rank, args.gpu = 0, 0
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29500"
    else:
        raise SystemExit("no GPU")
    dist.init_process_group("nccl", init_method="env://", rank=args.rank)
    torch.cuda.set_device(args.gpu)
    dist.barrier()
    student = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    teacher = copy.deepcopy(student)
    student = DDP(student, device_ids=[args.gpu])
    teacher.load_state_dict(student.module.state_dict())
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=args.batch_size_per_gpu, drop_last=True)
    optimizer = torch.optim.AdamW(student.parameters())
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for images, _ in loader:
            images = images.cuda(non_blocking=True)
            with torch.no_grad():
                target = teacher(images)
            loss = (student(images) - target).pow(2).mean()
            if not torch.isfinite(loss):
                print("Loss is not finite, stopping training", force=True)
                raise SystemExit(1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for q, k in zip(student.module.parameters(), teacher.parameters()):
                    k.data.mul_(0.99).add_((1 - 0.99) * q.detach().data)
        save_dict = {"student": student.module.state_dict(), "teacher": teacher.state_dict()}
        if args.rank == 0:
            torch.save(save_dict, os.path.join(args.output_dir, "checkpoint.pth"))
    dist.destroy_process_group()
