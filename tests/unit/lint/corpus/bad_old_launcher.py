# SPDX-License-Identifier: Apache-2.0
"""Started by torch.distributed.launch, years ago."""

import argparse

import torch
import torch.distributed as dist
import torch.utils.data
import torch.utils.data.distributed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", default=0, type=int)  # expect: DDP121
    parser.add_argument("--batch-size", default=32, type=int)
    args = parser.parse_args()
    x = torch.ones(1).cuda()  # expect: DDP119
    torch.cuda.set_device(args.local_rank)
    torch.distributed.init_process_group(backend="nccl", init_method="env://")  # expect: DDP605
    net = torch.nn.Linear(4, 1).cuda()
    net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[args.local_rank], output_device=args.local_rank)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    train_part, val_part = torch.utils.data.random_split(data, [48, 16])  # expect: DDP415
    sampler = torch.utils.data.distributed.DistributedSampler(train_part)  # expect: DDP402
    loader = torch.utils.data.DataLoader(train_part, args.batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(90):
        for a, b in loader:
            loss = (net(a.cuda()) - b.cuda()).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.all_reduce(x)


main()
