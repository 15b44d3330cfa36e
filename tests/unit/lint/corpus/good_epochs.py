# SPDX-License-Identifier: Apache-2.0
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split


def main(ds, net):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    g = torch.Generator().manual_seed(0)
    perm = torch.randperm(len(ds), generator=g)
    train, val = random_split(torch.utils.data.Subset(ds, perm.tolist()), [0.9, 0.1], generator=g)
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    net = DDP(net, device_ids=[local])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler, num_workers=2)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    start = 0
    if os.path.exists("last.pt"):
        blob = torch.load("last.pt", map_location="cpu", weights_only=True)
        net.module.load_state_dict(blob["net"])
        start = blob["epoch"]
    for epoch in range(start, 10):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=local)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            loss.backward()
            opt.step()
            opt.zero_grad()
            total += torch.stack([loss.detach() * len(x), torch.tensor(float(len(x)), device=local)])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(epoch, (total[0] / total[1]).item())
            torch.save({"net": net.module.state_dict(), "epoch": epoch}, "last.pt.tmp")
            os.replace("last.pt.tmp", "last.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main([], torch.nn.Linear(1, 1))
