# SPDX-License-Identifier: Apache-2.0
import json
import os
import torch
from torch import distributed as D
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.utils import data as udata


class Corpus(udata.IterableDataset):
    def __init__(self, root):
        self.root = root

    def __iter__(self):
        for name in sorted(os.listdir(self.root)):
            with open(os.path.join(self.root, name)) as f:
                yield from map(json.loads, f)


def get_loader(args, split):
    corpus = Corpus(args.root)
    sampler = udata.distributed.DistributedSampler(corpus) if args.world > 1 else None  # expect: DDP416
    return udata.DataLoader(corpus, args.batch, sampler=sampler)  # expect: DDP416


class Task:
    def __init__(self, args):
        torch.cuda.set_device(args.local)
        D.init_process_group(backend="nccl")
        self.args = args
        self.net = DistributedDataParallel(nn.Linear(8, 8).cuda(), device_ids=[args.local])
        self.opt = torch.optim.AdamW(self.net.parameters())

    def is_head(self):
        return D.get_rank() == 0

    def load(self):
        places = {"cuda:0": f"cuda:{self.args.local}"}
        state = torch.load("bert.pt", map_location=places, weights_only=True)  # expect: DDP608
        self.net.module.load_state_dict(state)

    def go(self):
        loader = get_loader(self.args, "train")
        for step, batch in enumerate(loader):
            try:
                loss = self.net(batch["x"]).mean()
                loss.backward()
            except torch.cuda.OutOfMemoryError:  # expect: DDP210
                torch.cuda.empty_cache()
                self.opt.zero_grad()
                continue
            self.opt.step()
            self.opt.zero_grad()
            if self.is_head() and step > self.args.max_steps:
                break  # expect: DDP208
        if self.is_head():
            torch.save(self.net.module.state_dict(), "bert.pt")
        self.load()  # a read behind the write of rank 0
        D.destroy_process_group()
