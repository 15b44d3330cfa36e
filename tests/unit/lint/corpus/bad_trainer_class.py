# SPDX-License-Identifier: Apache-2.0
"""A Trainer class whose loader has a sampler and whose epochs all have one order."""

import os

import torch
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Rows(Dataset):
    def __len__(self):
        return 2048

    def __getitem__(self, i):
        return torch.full((20,), float(i)), torch.tensor([float(i)])


class Trainer:
    def __init__(self, model, data, optimizer, gpu_id, save_every):
        self.gpu_id = gpu_id
        self.model = DistributedDataParallel(model.to(gpu_id), device_ids=[gpu_id])
        self.data = data
        self.optimizer = optimizer
        self.save_every = save_every

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        for source, targets in self.data:
            self._run_batch(source.to(self.gpu_id), targets.to(self.gpu_id))

    def _save(self, epoch):
        torch.save(self.model.module.state_dict(), "checkpoint.pt")  # expect: DDP603

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            if epoch % self.save_every == 0:
                self._save(epoch)


def main(rank, world_size, epochs):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    init_process_group("nccl", rank=rank, world_size=world_size)
    data = Rows()
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))  # expect: DDP402
    Trainer(model, loader, optimizer, rank, 10).train(epochs)
    destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(torch.cuda.device_count(), 10), nprocs=torch.cuda.device_count())
