# SPDX-License-Identifier: Apache-2.0
import argparse
import os
import subprocess
import sys
import torch
import torch.distributed as dist


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--local-rank", "--local_rank", type=int, default=-1, dest="lr_")  # expect: DDP121
    p.add_argument("--lr", type=float)
    return p.parse_args()


def start(n):
    os.system(f"python -m torch.distributed.launch --nproc_per_node={n} train.py")  # expect: DDP121
    subprocess.check_call("python -m torch.distributed.launch train.py", shell=True)  # expect: DDP121


def main():
    a = parse()
    torch.cuda.set_device(a.lr_)
    dist.init_process_group("nccl")
    x = torch.ones(1).cuda()
    dist.all_reduce(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    main() if len(sys.argv) > 1 else start(2)
