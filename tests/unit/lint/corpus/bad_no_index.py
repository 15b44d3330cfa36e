# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def worker(gpu, world):
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:23456", rank=gpu, world_size=world)
    torch.manual_seed(1234)
    net = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Dropout(0.1)).to("cuda")  # expect: DDP118
    net = DistributedDataParallel(net, device_ids=[gpu])
    opt = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(100):
        inputs = torch.randn(16, 20).to(gpu)  # expect: DDP407
        loss = net(inputs).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


def main():
    n = torch.cuda.device_count()
    mp.spawn(worker, nprocs=n, args=(n,))  # expect: DDP111


main()
