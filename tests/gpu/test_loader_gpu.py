# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to a GPU: pinned where that was asked for, copied while the host goes on, and right."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from ddpilot import FakeGroup
from ddpilot.data.loaders import make_loader
from ddpilot.data.nested import to_device
from ddpilot.environments.nvml import count_accelerators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_accelerators(os.environ) == 0, reason="no NVIDIA device is visible to NVML here"),
]
NUM_BATCHES, SIZE, WIDTH = 40, 8, 100_000


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Sample i is a long row of i."""

    def __len__(self) -> int:
        return NUM_BATCHES * SIZE

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"row": torch.full((WIDTH,), float(number)), "id": torch.tensor(number)}


@pytest.mark.parametrize(("num_workers", "cache"), [(0, False), (2, False), (0, True)])
def test_pinned_batches_arrive_whole_while_the_gpu_is_busy(num_workers: int, cache: bool) -> None:
    """Each batch is made while the copy of the one before may still be under way, and its memory used again."""
    group = FakeGroup()
    options: dict[str, Any] = {"pin_memory": True, "num_workers": num_workers, "cache": cache}
    loader = make_loader(Rows(), rank=group.rank, world_size=group.world_size, global_batch_size=SIZE, **options)
    busy = torch.randn(4000, 4000, device="cuda")
    sums, ids = [], []
    for epoch in range(2):
        for batch in loader.iterate(epoch):
            assert cache or batch.data["row"].is_pinned()
            busy = (busy @ busy).clamp(-1, 1)
            moved = to_device(batch.data, "cuda")
            del batch
            sums.append(moved["row"].double().mean(1))
            ids.append(moved["id"].double())
    assert torch.equal(torch.cat(sums), torch.cat(ids))


def test_to_device_waits_for_values_on_their_way_to_the_host() -> None:
    """A copy from the GPU that did not wait would show what the host's memory had in it before."""
    busy = torch.randn(4000, 4000, device="cuda")
    for number in range(20):
        busy = (busy @ busy).clamp(-1, 1)
        on_gpu = torch.full((1_000_000,), float(number), device="cuda") + busy[0, 0] * 0
        assert to_device({"x": on_gpu}, "cpu")["x"].eq(number).all()
