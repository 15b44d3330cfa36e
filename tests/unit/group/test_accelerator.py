# SPDX-License-Identifier: Apache-2.0
"""What is decided about accelerators, without one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddpilot import FakeGroup
from ddpilot.group.device import device_ids, fork_rng, is_divided, memory_facts, runs_behind, wire_device
from ddpilot.training.step.empty_batch import fills

CUDA = torch.device("cuda", 1)


class On(nn.Module):
    """A model with parameters that seem to be on `devices`."""

    def __init__(self, *devices: torch.device) -> None:
        super().__init__()
        self._places = [SimpleNamespace(device=device) for device in devices]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """One on each device."""
        return iter(self._places)


@pytest.mark.parametrize(
    ("backend", "expected"), [("gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("nccl", "cuda:1"), ("fake", "cuda:1")]
)
def test_wire_device_is_the_cpu_if_the_group_can_use_it(backend: str, expected: str) -> None:
    """A group with gloo needs no copy to the accelerator, and no wait for it."""
    assert str(wire_device(FakeGroup(device=CUDA, backend=backend))) == expected


def test_device_ids_are_for_models_on_one_accelerator() -> None:
    """DDP refuses them for a model on several; on the CPU there are none."""
    split = On(CUDA, torch.device("cuda", 0))
    assert [device_ids(On(CUDA), CUDA), device_ids(split, CUDA)] == [[1], None]
    assert device_ids(nn.Linear(1, 1), torch.device("cpu")) is None
    assert is_divided(split, CUDA)
    assert not is_divided(On(CUDA, torch.device("cpu")), CUDA)


def test_runs_behind_and_memory_facts_on_the_cpu() -> None:
    """There is no accelerator to wait for or to measure; the random state is restored."""
    assert [runs_behind(torch.device(kind)) for kind in ("cpu", "mps", "cuda", "xpu")] == [False, False, True, True]
    assert memory_facts(torch.device("cpu")) is None
    with fork_rng([torch.device("cpu")]):
        drawn, *numbers = torch.rand(2), random.random(), np.random.rand()
    assert torch.equal(torch.rand(2), drawn)
    assert [random.random(), np.random.rand()] == numbers


def test_made_up_rows_begin_with_zeros_on_accelerators() -> None:
    """An index of one may be beyond a table, which leaves an accelerator without a context; the CPU raises."""
    assert fills(nn.Linear(1, 1)) == (1, 0)
    assert fills(nn.Linear(1, 1, device="meta")) == (0, 1)
