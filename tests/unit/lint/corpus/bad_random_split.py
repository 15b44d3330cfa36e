# SPDX-License-Identifier: Apache-2.0
import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, random_split
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP
from mydata import Corpus
from mymodel import GPT


def evaluate(model, dl):
    model.eval()
    losses = []
    for b in dl:
        with torch.no_grad():
            losses.append(model(b).item())
    model.train()
    return sum(losses) / len(losses)


def main():
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank)
    full = Corpus("data")
    tr, va = random_split(full, [len(full) - 1000, 1000])  # expect: DDP415
    tr_dl = DataLoader(tr, 8, sampler=DistributedSampler(tr), shuffle=True)  # expect: DDP413 DDP402
    va_dl = DataLoader(va, 8)
    model = DDP(GPT().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters())
    step = 0
    for epoch in range(10):
        for b in tr_dl:
            try:
                loss = model(b.cuda())
                loss.backward()
            except RuntimeError as e:  # expect: DDP210
                if "out of memory" in str(e):
                    torch.cuda.empty_cache()
                    continue
                raise e
            opt.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if step % 500 == 0 and dist.get_rank() == 0:
                torch.save(model.module.state_dict(), "last.pt")
        model.module.load_state_dict(torch.load("last.pt", map_location="cpu"))  # expect: DDP608 DDP610
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
