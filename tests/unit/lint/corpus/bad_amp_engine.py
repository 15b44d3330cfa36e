# SPDX-License-Identifier: Apache-2.0
import os
import torch
import torch.distributed as dist
from torch.cuda import amp
from torch.nn.parallel import DistributedDataParallel as Dist


class Loop:
    def __init__(self, net, loader, accumulate):
        self.local_rank = int(os.getenv("LOCAL_RANK", "0"))
        self.scaler = amp.GradScaler(enabled=True)  # expect: DDP336
        self.net = Dist(net.to(self.local_rank), device_ids=[self.local_rank])
        self.loader = loader
        self.accumulate = accumulate
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1)

    def run(self):
        for n, (x, y) in enumerate(self.loader):
            x, y = x.to(self.local_rank), y.to(self.local_rank)
            with amp.autocast():  # expect: DDP336
                loss = self.loss(x, y)
            last = (n + 1) % self.accumulate == 0
            if not last:
                with self.net.no_sync():  # expect: DDP328
                    self.scaler.scale(loss).backward()
                continue
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self.net(x), y)


def main(net, loader):
    local_rank = int(os.environ["LOCAL_RANK"])
    weights = torch.load("pre.pt")  # expect: DDP609 DDP610
    net.load_state_dict(weights)
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    Loop(net, loader, 4).run()
    dist.destroy_process_group()
