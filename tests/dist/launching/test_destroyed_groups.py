# SPDX-License-Identifier: Apache-2.0
"""A function that destroys its group before its DDP model goes does not hang on its way out."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpilot

NUM_TIMES = 20


def train_and_destroy() -> weakref.ref[dist.ProcessGroup]:
    """As a training function of anybody's: the model is still there when the group is destroyed."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)))
    for _ in range(10):
        model(torch.randn(4, 4)).square().mean().backward()
    dist.destroy_process_group()
    return weakref.ref(group)


def train_often() -> int:
    """How many of the groups are still in memory; torch itself keeps the last one."""
    groups = [train_and_destroy() for _ in range(NUM_TIMES)]
    gc.collect()
    return sum(group() is not None for group in groups)


@pytest.mark.timeout(60)
def test_destroyed_groups_neither_hang_nor_stay() -> None:
    """Their destructor would wait for gloo's threads with Python's lock held, which those may be waiting for."""
    results = ddpilot.Launcher(nproc_per_node=2, timeout_s=45, watch=False).run(train_often)
    assert max(results) <= 1
