# SPDX-License-Identifier: Apache-2.0
"""What `Loop` adds to a step of FSDP2: `shard="parameters"` against `fully_shard` by hand, two ranks.

Both take short turns in the same ranks, each time in the other order, as in `step_cost`, whose figures mean the same.
The loop also looks in each update whether a gradient of any rank is not finite, which `fully_shard` by hand does not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import ddpilot
from benchmarks.measure import Row, main
from benchmarks.step_cost import LONG_LIMIT, WARM_UP, Taken, enter_group, make_row, run, take_turns
from benchmarks.step_loops import Job, by_ddpilot, by_hand

NUM_RANKS = 2
NUM_STEPS = WARM_UP + 20
WIDTH, NUM_BLOCKS = 384, 4


class Block(nn.Module):
    """A layer that is gathered as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, width), and so is the result."""
        return torch.as_tensor(x + self.layers(x))


@dataclass(frozen=True)
class ShardedJob(Job):
    """Blocks that are gathered one after the other."""

    num_steps: int = NUM_STEPS
    num_matmuls: int = 0
    batch_size_per_rank: int = 64

    def dataset(self) -> TensorDataset:
        """Just as many samples as the ranks need."""
        torch.manual_seed(0)
        x = torch.randn(self.num_steps * self.batch_size_per_rank * NUM_RANKS, WIDTH)
        return TensorDataset(x, x[:, :8].argmax(1))

    def model(self) -> nn.Module:
        """A stack of blocks, and a head."""
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 8))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """One that has a state."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3)


def shard_by_hand(model: nn.Module) -> nn.Module:
    """`fully_shard` for each block and for the rest."""
    for block in model.children():
        if isinstance(block, Block):
            fully_shard(block)
    fully_shard(model)
    return model


def measure_sharded(rounds: int) -> Taken:
    """Both by turns."""
    enter_group()
    job = ShardedJob()
    ours = by_ddpilot(job, shard=ddpilot.ParameterSharding(layers=Block), progress=False)
    return take_turns({"by hand": by_hand(job, shard_by_hand), "ddpilot": ours}, rounds)


def measure(rounds: int) -> list[Row]:
    """One row."""
    taken = run(measure_sharded, NUM_RANKS, rounds)
    return [make_row(f"a step of FSDP2, {NUM_RANKS} ranks", taken, "by hand", LONG_LIMIT, "ms")]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=30))
