# SPDX-License-Identifier: Apache-2.0
"""What a loop says points at the user's line, and never at ddpilot's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpilot
from ddpilot.group.fake import FakeGroup


class Small(ddpilot.Trainer):
    """Its step goes over other data too, whose batches are small for a BatchNorm on two ranks."""

    def train_batch(self, run: ddpilot.Run, batch: object) -> torch.Tensor:
        """Says so, from inside of `Trainer.fit`."""
        del run, batch
        loop = ddpilot.Loop(group=FakeGroup(world_size=2))
        loop.prepare(nn.BatchNorm1d(2))
        next(iter(loop.batches(loop.loader(DATA, global_batch_size=4))))
        return torch.zeros(())


DATA = TensorDataset(torch.ones(4, 2), torch.ones(4, 1))


def test_a_finding_names_the_users_line() -> None:
    """However many frames of ddpilot are above it and below it."""
    trainer = Small(nn.Linear(2, 1), None, lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.warns(UserWarning, match="DDP501") as caught:
        trainer.fit(DATA, global_batch_size=4, nproc_per_node=0, progress=False)
    assert [one.filename for one in caught if "DDP501" in str(one.message)] == [__file__]
