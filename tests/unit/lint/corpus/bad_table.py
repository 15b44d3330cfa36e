# SPDX-License-Identifier: Apache-2.0
import argparse
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch.nn import SyncBatchNorm, BatchNorm1d, Linear, Sequential
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load_table(path):
    frame = pd.read_csv(path)
    order = np.random.permutation(len(frame))  # expect: DDP415
    x = torch.tensor(frame.values[order, :-1], dtype=torch.float32)
    y = torch.tensor(frame.values[order, -1:], dtype=torch.float32)
    n = len(x) * 9 // 10
    return TensorDataset(x[:n], y[:n]), TensorDataset(x[n:], y[n:])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--csv")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    train, val = load_table(a.csv)
    model = Sequential(Linear(10, 32), BatchNorm1d(32), Linear(32, 1))
    model = DDP(model)  # expect: DDP408
    train_dl = DataLoader(train, batch_size=8, sampler=DistributedSampler(train))  # expect: DDP402
    val_dl = DataLoader(val, batch_size=8)
    opt = torch.optim.Adam(model.parameters())
    for epoch in range(50):
        for x, y in train_dl:
            loss = (model(x) - y).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            model.eval()
            errs = [(model(x) - y).abs().mean().item() for x, y in val_dl]  # expect: DDP211
            print(sum(errs) / len(errs))
            model.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
