# SPDX-License-Identifier: Apache-2.0
"""A batch size for ranks of which one has less memory than the others."""

from __future__ import annotations

import sys
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot.training.batch_size import find_batch_size
from ddpilot.training.loop import Loop
from tests.dist.training.bodies import launch

ROW = 1 << 19
"""Numbers of four bytes that the step below makes of each sample: 2 MiB."""


def wide_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss with large activations."""
    return torch.as_tensor(model(batch[0]).expand(-1, ROW).square().mean())


def search(limited_rank: int, free_bytes: int) -> dict[str, Any]:
    """Search where one rank is given little memory by its system, then train on."""
    loop = Loop(seed=1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = loop.prepare(model, optimizer)
    data = TensorDataset(torch.randn(4000, 2))
    loader = loop.loader(data, global_batch_size=1000)

    def train_epoch() -> list[float]:
        for (x,) in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(model(x).square().mean())
            loop.step(optimizer)
        return [value for weight in model.parameters() for value in weight.flatten().tolist()]

    train_epoch()
    before = torch.get_rng_state(), [weight.detach().clone() for weight in model.parameters()]
    if loop.rank == limited_rank:
        import resource

        vms = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (vms + free_bytes, resource.RLIM_INFINITY))
    found = find_batch_size(loop, model, optimizer, data, wide_step, max_per_rank=256)
    if loop.rank == limited_rank:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    same = all(torch.equal(new, old) for new, old in zip(model.parameters(), before[1], strict=True))
    return {"found": found, "same": same and torch.equal(torch.get_rng_state(), before[0]), "after": train_epoch()}


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
def test_find_batch_size_is_that_of_the_rank_with_the_least_memory() -> None:
    """Rank 1's allocator refuses: every rank has its answer, nothing has changed, and training goes on in step."""
    zero, one = launch(2, search, 1, 300 << 20)
    assert zero["found"] == one["found"]
    assert zero["same"]
    assert one["same"]
    assert zero["after"] == one["after"]
    failed = {trial.failed_ranks for trial in zero["found"].trials}
    assert failed == {(), (1,)}
    # Each sample takes 2 MiB or more, of 300; a thread's first allocation reserves 64.
    assert 4 <= zero["found"].largest <= 150
