# SPDX-License-Identifier: Apache-2.0
"""What `Loop` adds to a step of FSDP2: `shard="parameters"` against `fully_shard` by hand, two ranks.

Both take short turns in the same ranks, each time in the other order, as in `step_cost`, whose figures mean the same.
The loop also looks in each update whether a gradient of any rank is not finite, which `fully_shard` by hand does not.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpilot
from benchmarks.measure import Row, main
from benchmarks.step_cost import LONG_LIMIT, WARM_UP, Taken, enter_group, make_row, run, take_turns
from benchmarks.step_loops import Epoch, Moment, now

NUM_RANKS = 2
NUM_STEPS = WARM_UP + 20
BATCH_SIZE_PER_RANK = 64
WIDTH, NUM_BLOCKS = 384, 4


class Block(nn.Module):
    """A layer that is gathered as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, width), and so is the result."""
        return torch.as_tensor(x + self.layers(x))


def make_parts() -> tuple[TensorDataset, nn.Sequential]:
    """Just as many samples as the ranks need, and the model."""
    torch.manual_seed(0)
    x = torch.randn(NUM_STEPS * BATCH_SIZE_PER_RANK * NUM_RANKS, WIDTH)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 8))
    return TensorDataset(x, x[:, :8].argmax(1)), model


def by_hand() -> Epoch:
    """`fully_shard` for each block and for the rest."""
    dataset, model = make_parts()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE_PER_RANK, sampler=sampler)
    for block in model.children():
        if isinstance(block, Block):
            fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    epochs = iter(range(10**9))

    def epoch() -> list[Moment]:
        stamps = []
        sampler.set_epoch(next(epochs))
        for x, y in loader:
            stamps.append(now())
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        return stamps

    return epoch


def by_ddpilot() -> Epoch:
    """`Loop`, with everything that it does unasked."""
    dataset, model = make_parts()
    loop = ddpilot.Loop(seed=0, progress=False)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = loop.prepare(model, optimizer, shard=ddpilot.ParameterSharding(layers=Block))
    loader = loop.loader(dataset, batch_size_per_rank=BATCH_SIZE_PER_RANK, shuffle=True)

    def epoch() -> list[Moment]:
        stamps = []
        for _ in loop.epochs(loop.epoch + 1):
            for x, y in loop.batches(loader):
                stamps.append(now())
                with loop.accumulate(model):
                    loop.backward(nn.functional.cross_entropy(model(x), y))
                loop.step(optimizer)
        return stamps

    return epoch


def measure_sharded(rounds: int) -> Taken:
    """Both by turns."""
    enter_group()
    return take_turns({"by hand": by_hand(), "ddpilot": by_ddpilot()}, rounds)


def measure(rounds: int) -> list[Row]:
    """One row."""
    taken = run(measure_sharded, NUM_RANKS, rounds)
    return [make_row(f"a step of FSDP2, {NUM_RANKS} ranks", taken, "by hand", LONG_LIMIT, "ms")]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=30))
