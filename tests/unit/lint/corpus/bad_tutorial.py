# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def setup(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def run(rank, world_size):
    setup(rank, world_size)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    ddp_model = DistributedDataParallel(model)
    ddp_model = ddp_model.cuda(rank)  # expect: DDP331
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    dataset = torch.utils.data.TensorDataset(torch.randn(100, 10), torch.randn(100, 5))
    loader = torch.utils.data.DataLoader(dataset, batch_size=10)  # expect: DDP401
    best = 1e9
    for epoch in range(10):
        total = 0.0
        for inp, tgt in loader:
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(inp.cuda(rank)), tgt.cuda(rank))
            loss.backward()
            optimizer.step()
            total += loss.item()
            print("step loss", loss.item())  # expect: DDP411
        if total < best:
            best = total
            torch.save(ddp_model.module.state_dict(), "best.pt")  # expect: DDP603
        if rank == 0:
            dist.barrier()  # expect: DDP220
    cleanup()


def main():
    mp.spawn(lambda r: run(r, 2), nprocs=2)  # expect: DDP113 DDP111


main()
