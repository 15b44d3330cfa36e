# SPDX-License-Identifier: Apache-2.0
"""Batch sizes and times of forward passes on a GPU: real refusals of its allocator, and its own clock."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup, find_batch_size
from ddpilot.environments.nvml import count_accelerators
from ddpilot.trainer.callbacks.performance import ForwardClock
from ddpilot.training.loop import Loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_accelerators(os.environ) == 0, reason="no NVIDIA device is visible to NVML here"),
]

ROW_BYTES = 1 << 24


def wide_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss with 16 MiB or more for each sample."""
    return torch.as_tensor(model(batch[0]).expand(-1, ROW_BYTES // 4).square().mean())


def test_find_batch_size_finds_the_limit_of_the_device() -> None:
    """1 GiB is left for 16 MiB a sample and more; weights, moments and the random state are as before, bit for bit."""
    device = torch.device("cuda", 0)
    loop = Loop(group=FakeGroup(device=device))
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 2, device=device)).sum().backward()
    optimizer.step()
    before = [tensor.clone() for tensor in [*model.parameters(), torch.cuda.get_rng_state(device)]]
    fraction = (torch.cuda.memory_reserved(device) + (1 << 30)) / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        found = find_batch_size(loop, model, optimizer, TensorDataset(torch.randn(5000, 2)), wide_step)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert 4 <= found.largest <= 64
    assert any(trial.failed_ranks for trial in found.trials)
    assert all(trial.peak_bytes > 0 for trial in found.trials)
    after = [*model.parameters(), torch.cuda.get_rng_state(device)]
    assert all(torch.equal(now, then) for now, then in zip(after, before, strict=True))


def test_cuda_clock_has_the_time_of_the_device() -> None:
    """Not that of the host, which only asks for the work; what is asked once is not counted again."""
    device = torch.device("cuda", 0)
    weights = torch.randn(4096, 4096, device=device)
    clock = ForwardClock(device)
    for _ in range(3):
        clock.begin()
        for _ in range(10):
            weights @ weights
        clock.end()
    assert clock.take_s() > 1e-4
    assert clock.take_s() == 0
