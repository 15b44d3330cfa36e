# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
import torch
from torch import nn
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def reduce_mean(t, n):
    rt = t.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    return rt / n


def evaluate(rank, n, preds, labels):
    correct = (preds == labels).float().sum()
    acc = correct / len(labels)
    if rank != 0:
        return None
    return reduce_mean(acc, n)  # expect: DDP208


def main_worker(rank, n):
    x = torch.ones(2).cuda()  # expect: DDP119
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=n)
    print(evaluate(rank, n, x, x))
    try:
        dist.all_reduce(x)
    except Exception as e:
        dist.barrier()  # expect: DDP210
        raise
    finally:
        dist.destroy_process_group()


def legacy():
    cmd = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", "x.py"]  # expect: DDP121
    return subprocess.Popen(cmd)


multiprocessing.spawn(main_worker, (2,), 2)  # expect: DDP111
