# SPDX-License-Identifier: Apache-2.0
import os
import torch
from torch.distributed import all_reduce, barrier, destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def build(device):
    m = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 1))
    wrapped = DistributedDataParallel(m)
    return wrapped.to(device)  # expect: DDP331


def make_loader(n, batch):
    data = TensorDataset(torch.randn(n, 10), torch.randn(n, 1))
    return DataLoader(data, batch_size=batch, shuffle=True, num_workers=2)  # expect: DDP401


def chief():
    return get_rank() == 0


def sync(t):
    all_reduce(t)
    return t


def train(model, loader, opt, device, epochs):
    for ep in range(epochs):
        running = torch.zeros(1, device=device)
        for x, y in loader:
            opt.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            opt.step()
            running += loss.detach()
        if chief():
            print(ep, sync(running).item())  # expect: DDP220
    if not chief():
        return
    barrier()  # expect: DDP208
    torch.save(model.module.state_dict(), "final.pt")


def run():
    init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    model = build(device)
    opt = torch.optim.Adam(model.parameters())
    train(model, make_loader(4096, 32), opt, device, 5)
    destroy_process_group()


if __name__ == "__main__":
    run()
