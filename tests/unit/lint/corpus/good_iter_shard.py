# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, files, rank, world):
        self.files, self.rank, self.world = files, rank, world

    def __iter__(self):
        info = get_worker_info()
        n, k = (info.num_workers, info.id) if info else (1, 0)
        for f in self.files[self.rank * n + k :: self.world * n]:
            yield torch.load(f, map_location="cpu", weights_only=True)


def main(files):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(Stream(files, rank, world), batch_size=4, num_workers=2)
    net = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    with net.join():
        for x in loader:
            net(x).mean().backward()
            opt.step()
            opt.zero_grad()
    torch.save(net.module.state_dict(), f"part-{rank}.pt")
    dist.barrier()
    if rank == 0:
        whole = [torch.load(f"part-{r}.pt", map_location="cpu", weights_only=True) for r in range(world)]
        print(len(whole))
    dist.destroy_process_group()


if __name__ == "__main__":
    main([])
