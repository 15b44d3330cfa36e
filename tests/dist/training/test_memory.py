# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out on one rank: named there, and tried together where a rank is to survive it. Real allocations."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import OutOfMemoryError, RankError
from ddpilot.errors import RemoteRankError
from ddpilot.training.coordination.out_of_memory import joint_try
from ddpilot.training.loop import Loop
from tests.dist.training.bodies import launch

_ROOM = 2**30
_WANTED = 2**30  # float32: four times the room


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process have no more than `_ROOM` bytes of address space beside what it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def try_on_one(how: str, loop: Loop) -> Any:
    """Rank 1 wants more than there is, or fails otherwise; afterwards both reduce something together."""

    def attempt() -> int:
        if loop.rank == 1 and how == "memory":
            torch.zeros(_WANTED)
        if loop.rank == 1 and how == "other":
            raise ValueError("no such layer")
        return loop.rank

    with little_memory():
        try:
            outcome = joint_try(attempt, loop.group)
        except (RemoteRankError, ValueError) as error:
            return type(error).__name__, str(error), loop.reduce(1, "sum").item()
    return outcome.value, outcome.ran_out, outcome.found, loop.reduce(1, "sum").item()


def try_all() -> list[Any]:
    """Each way, in one group."""
    loop = Loop()
    return [try_on_one(how, loop) for how in ("memory", "fits", "other")]


def test_joint_try_tells_all_ranks_where_memory_ran_out() -> None:
    """The rank gets no value, the others theirs; the group works on. What is no lack of memory raises on all."""
    (memory, fitted, failed), (memory_1, fitted_1, failed_1) = launch(2, try_all)
    assert (memory[0], memory_1[0]) == (0, None)
    assert memory[1:] == memory_1[1:]
    assert (memory[1], memory[3]) == ((1,), 2.0)
    assert "memory ran out: this machine has " in memory[2]
    assert "GiB for 2 ranks, of which this process holds" in memory[2]
    assert (fitted, fitted_1) == ((0, (), "", 2.0), (1, (), "", 2.0))
    assert (failed[0], failed_1[0]) == ("RemoteRankError", "ValueError")
    assert "rank 1 raised ValueError: no such layer" in failed[1]
    assert failed[2] == failed_1[2] == 2.0


def run_out_of_memory() -> None:
    """Rank 1 cannot have what its forward wants, in the second batch; rank 0 waits for its gradients."""
    loop = Loop()
    model = loop.prepare(nn.Linear(2, 1))
    loader = loop.loader(TensorDataset(torch.ones(12, 2)), global_batch_size=4)
    with little_memory():
        for number, (x,) in enumerate(loop.batches(loader)):
            with loop.accumulate(model):
                out = model(x)
                if (number, loop.rank) == (1, 1):
                    out = out + torch.zeros(_WANTED)[0]
                loop.backward(out.mean())


def test_memory_that_runs_out_in_a_batch_is_said_with_rank_batch_and_figures() -> None:
    """And it is the failure that counts, not that of the rank that waited."""
    with pytest.raises(RankError) as caught:
        launch(2, run_out_of_memory)
    error = caught.value.__cause__
    assert isinstance(error, OutOfMemoryError)
    assert (caught.value.rank, error.rank) == (1, 1)
    assert str(error).startswith(
        "[rank 1] training on batch 1 of epoch 0: memory ran out with 2 samples on this rank: this machine has "
    )
    assert "can't allocate memory" in error.found
    assert error.fix.startswith("Use a smaller batch per rank with accumulate= (of Loop or Trainer)")
