# SPDX-License-Identifier: Apache-2.0
import os, torch, argparse
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CIFAR10
import torchvision.transforms as T


class AverageMeter:
    def __init__(self):
        self.sum = 0
        self.count = 0

    def update(self, v, n):
        self.sum += v * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count

    def all_reduce(self):
        t = torch.tensor(self.avg).cuda()
        dist.all_reduce(t)  # expect: DDP406
        return t / dist.get_world_size()


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--gpu", default="cuda:0")
    return p.parse_args()


def main():
    args = get_args()
    world = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl", rank=rank, world_size=world)  # expect: DDP605
    torch.cuda.set_device(rank % torch.cuda.device_count())
    tf = T.Compose([T.ToTensor()])
    trainset = CIFAR10(".", download=True, transform=tf)
    train_sampler = DistributedSampler(trainset, num_replicas=world, rank=rank)  # expect: DDP402
    kwargs = {"num_workers": 4, "pin_memory": True}
    trainloader = DataLoader(trainset, batch_size=128, sampler=train_sampler, **kwargs)
    net = torch.hub.load("pytorch/vision", "resnet18").cuda()
    net = DDP(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200)
    meter = AverageMeter()
    for ep in range(200):
        for bi, batch in enumerate(trainloader):
            imgs, labels = (t.cuda() for t in batch)
            out = net(imgs)
            loss = torch.nn.functional.cross_entropy(out, labels)
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter.update(loss.item(), len(imgs))
        sched.step()
        if rank == 0:
            print(meter.all_reduce())  # expect: DDP220
        if rank == 0 and ep % 10 == 0:
            ck = dict(net=net.state_dict(), opt=opt.state_dict())  # expect: DDP602
            torch.save(ck, f"ck{ep}.pt")


if __name__ == "__main__":
    main()
