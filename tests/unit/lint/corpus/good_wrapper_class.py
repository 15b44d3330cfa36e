# SPDX-License-Identifier: Apache-2.0
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Comm:
    """Collectives that do nothing on one process."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.local = int(os.environ.get("LOCAL_RANK", 0))
        if self.world > 1:
            torch.cuda.set_device(self.local)
            dist.init_process_group("nccl")

    @property
    def main(self):
        return self.rank == 0

    def wrap(self, m):
        m = m.to(f"cuda:{self.local}")
        return DistributedDataParallel(m, device_ids=[self.local]) if self.world > 1 else m

    def mean(self, t):
        if self.world == 1:
            return t
        t = t.clone()
        dist.all_reduce(t, op=dist.ReduceOp.AVG)
        return t

    def save(self, obj, path):
        if self.main:
            torch.save(obj, path)
        if self.world > 1:
            dist.barrier()

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()


def unwrap(m):
    return m.module if hasattr(m, "module") else m


def fit(net, loader, epochs):
    comm = Comm()
    net = comm.wrap(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for x in loader:
            loss = net(x).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        shown = comm.mean(loss.detach())
        if comm.main:
            print(shown.item())
        comm.save(unwrap(net).state_dict(), "x.pt")
        unwrap(net).load_state_dict(torch.load("x.pt", map_location=f"cuda:{comm.local}", weights_only=True))
    comm.close()
