# SPDX-License-Identifier: Apache-2.0
"""Metrics of unequal parts, weighted by numbers that every rank knows; the worst of them; averages of sums."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 2)).eval()
sizes = [20 + 3 * each for each in range(world)]
parts = TensorDataset(torch.randn(sizes[rank], 8), torch.randint(0, 2, (sizes[rank],)))


def evaluate() -> tuple[torch.Tensor, torch.Tensor]:
    """The accuracy of this rank's samples, and the sum of their losses."""
    correct, loss = torch.zeros(1), torch.zeros(1)
    with torch.no_grad():
        for x, y in DataLoader(parts, 8):
            out = model.module(x)
            correct += (out.argmax(1) == y).sum()
            loss += torch.nn.functional.cross_entropy(out, y, reduction="sum")
    return correct / sizes[rank], loss


def average(value: torch.Tensor) -> torch.Tensor:
    """The mean over the ranks."""
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    return value


accuracy, _ = evaluate()
accuracies = [torch.empty(1) for _ in range(world)]
dist.all_gather(accuracies, accuracy)
of_all = sum(each.item() * size for each, size in zip(accuracies, sizes, strict=True)) / sum(sizes)
worst = min(accuracies)
_, loss = evaluate()
mean_loss = average(loss) * world / sum(sizes)
dist.destroy_process_group()
