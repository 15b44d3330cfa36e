# SPDX-License-Identifier: Apache-2.0
"""A complete training script with plain DistributedDataParallel; `ddpilot.init_group()` is its only ddpilot call.

The same file runs alone, under torchrun, under Slurm, and from a notebook:

    python examples/raw_ddp.py --epochs 5
    torchrun --standalone --nproc-per-node 2 examples/raw_ddp.py --epochs 5
    srun --ntasks 2 python examples/raw_ddp.py --epochs 5
    results = ddpilot.launch(raw_ddp.train, 5, nproc_per_node=2)  # in a notebook here, after `import raw_ddp`

It classifies the handwritten digits of scikit-learn (1,797 scans of 8 x 8 pixels, read from the installed package).

Shapes: B images in the batch of one rank, C = 10 digits, H = W = 8 pixels.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpilot

NUM_TEST = 360


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and test digits, in the same order on every rank: images (N, 1, 8, 8) from 0 to 1, labels (N,)."""
    digits = load_digits()
    # The default dtype, not float32: a caller who wants float64 sets it once, for data and model together.
    images_NCHW = torch.tensor(digits.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16
    labels_N = torch.tensor(digits.target)
    order_N = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(0))
    train_N, test_N = order_N[NUM_TEST:], order_N[:NUM_TEST]
    return TensorDataset(images_NCHW[train_N], labels_N[train_N]), TensorDataset(images_NCHW[test_N], labels_N[test_N])


def build_model(norm: str) -> nn.Module:
    """A small CNN: images (B, 1, 8, 8) to class scores (B, 10). `norm`: "none", "batch" or "sync"."""
    batch_norm: list[nn.Module] = [] if norm == "none" else [nn.BatchNorm2d(16)]
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), *batch_norm, nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


def with_sync_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """Let all ranks share the batch statistics. Every forward pass in training is then collective."""
    if device.type != "cuda":
        raise SystemExit(
            f"--norm sync: torch's SyncBatchNorm needs GPUs, and this rank trains on {device}. "
            "Use --norm batch (each rank keeps the statistics of its own images) or --norm none."
        )
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return synced


def train_epoch(
    model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], optimizer: torch.optim.Optimizer, device: torch.device
) -> float:
    """Train once over this rank's shard; return the mean loss of all images of all ranks. Collective."""
    model.train()
    # float64: a sum over an epoch must not depend on how many ranks it was split over.
    sum_and_count_2 = torch.zeros(2, dtype=torch.float64, device=device)
    for images_BCHW, labels_B in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images_BCHW.to(device)), labels_B.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        sum_and_count_2[0] += loss.detach().double() * len(labels_B)
        sum_and_count_2[1] += len(labels_B)
    dist.all_reduce(sum_and_count_2)
    return float(sum_and_count_2[0] / sum_and_count_2[1])


@torch.no_grad()
def test_accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of right answers, 0 to 1, over every test image exactly once. Collective.

    `model` is the one inside DDP: its forward pass is not collective, so ranks may have unequal numbers of images, and
    none is repeated, as a DistributedSampler would do to make the shards equal.
    """
    model.eval()
    images_NCHW, labels_N = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in data.tensors)
    right = (model(images_NCHW.to(device)).argmax(dim=1).cpu() == labels_N).sum().item()
    right_and_count_2 = torch.tensor([right, len(labels_N)], dtype=torch.float64, device=device)
    dist.all_reduce(right_and_count_2)
    return float(right_and_count_2[0] / right_and_count_2[1])


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write all of it or nothing: a reader never sees half a file, also when the machine stops in between."""
    temporary = path.with_name(f"{path.name}.writing")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def train(
    epochs: int = 5,
    lr: float = 0.1,
    global_batch_size: int = 64,
    norm: str = "none",
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """Train and return what was learnt, on every rank the same: losses per epoch, test accuracy, weights on the CPU.

    `global_batch_size` images make one step, whatever the number of ranks, so with `norm="none"` the loss curve does
    not depend on it either. `checkpoint`: rank 0 writes weights and optimizer there after every epoch. Collective.
    """
    with ddpilot.init_group(seed=0) as group:
        train_data, test_data = load_data()
        model = build_model(norm).to(group.device)
        if norm == "sync":
            model = with_sync_batch_norm(model, group.device)
        ddp_model = DistributedDataParallel(model, device_ids=[group.device] if group.device.type == "cuda" else None)
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_data, seed=0)
        # drop_last: the ragged last batch would weigh more per image, and on some ranks more than on others.
        batch_size = global_batch_size // group.world_size
        loader = DataLoader(train_data, batch_size=batch_size, sampler=sampler, drop_last=True)
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr, momentum=0.9)
        losses = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)  # without it every epoch has the same order
            losses.append(train_epoch(ddp_model, loader, optimizer, group.device))
            if group.rank == 0:
                print(f"epoch {epoch + 1}/{epochs}: loss {losses[-1]:.4f}", flush=True)
            if group.rank == 0 and checkpoint is not None:
                state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save_checkpoint(checkpoint, state)
        accuracy = test_accuracy(model, test_data, group.device)
        if group.rank == 0:
            print(f"test accuracy {accuracy:.2%}, {group.world_size} rank(s) on {group.device.type}", flush=True)
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        return {"losses": losses, "accuracy": accuracy, "weights": weights}


def main(argv: Sequence[str] | None = None) -> int:
    """Read the options of the command line (`argv`, default `sys.argv[1:]`), train, return the exit status."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with DistributedDataParallel.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--global-batch-size", type=int, default=64, help="images per step, over all ranks together")
    parser.add_argument("--norm", choices=["none", "batch", "sync"], default="none", help="sync needs GPUs")
    parser.add_argument("--checkpoint", type=Path, help="rank 0 writes it after every epoch")
    options = parser.parse_args(argv)
    train(options.epochs, options.lr, options.global_batch_size, options.norm, options.checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
