# SPDX-License-Identifier: Apache-2.0
"""What a profile says of parts of a program on real ranks: evaluation without DDP, and groups of some ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import ddpilot


class Net(torch.nn.Module):
    """A model whose forward pass takes 2 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        """Sleep."""
        time.sleep(0.002)
        return self.layer(x)


def train(part: str) -> dict[str, float]:
    """Median milliseconds of the phases of updates that also do `part`."""
    loop = ddpilot.Loop(seed=0)
    model = Net()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    alone = [dist.new_group([rank]) for rank in range(loop.world_size)][loop.rank]
    data = torch.utils.data.TensorDataset(torch.randn(96, 4))
    with loop.profile() as profile:
        for (x,) in loop.batches(loop.loader(data, global_batch_size=8)):
            loop.backward(model(x).mean())
            loop.step(optimizer)
            if part == "evaluation":
                with torch.no_grad():
                    model.module(x)
            if part == "groups":
                time.sleep(0.005 * loop.rank)
                dist.all_reduce(torch.ones(1), group=alone)
    phases = profile.profile.phases
    return {name: 1e3 * phases.median(name) for name in ("forward", "evaluation", "waiting")}


def test_the_module_without_ddp_is_evaluated() -> None:
    """Programs evaluate `model.module`."""
    for found in ddpilot.launch(train, "evaluation", nproc_per_node=2):
        assert found["evaluation"] > 2
        assert found["forward"] > 2


def test_collectives_of_groups_of_some_ranks_are_not_matched_by_their_order() -> None:
    """Nobody waits in a group of one's own."""
    for found in ddpilot.launch(train, "groups", nproc_per_node=2):
        assert found["waiting"] == 0
