# SPDX-License-Identifier: Apache-2.0
"""A function that destroys its group before its DDP model goes does not hang on its way out."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpilot

NUM_TIMES = 4


@contextmanager
def busy_core() -> Iterator[None]:
    """Move this rank to one core, beside a process that keeps the core busy."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            yield
        finally:
            busy.kill()
            os.sched_setaffinity(0, cores)


def run_workers_last() -> int:
    """Let gloo's threads run only if nothing else would, as on a busy machine. Returns their number."""
    tasks = [each for each in Path("/proc/self/task").iterdir() if "pt_gloo_runloop" in (each / "comm").read_text()]
    for task in tasks:
        os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    return len(tasks)


def train_and_destroy() -> weakref.ref[dist.ProcessGroup]:
    """As a training function of anybody's: the model is still there when the group is destroyed."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)))
    dist.barrier()
    assert run_workers_last() > 0
    for _ in range(3):
        model(torch.randn(4, 4)).square().mean().backward()
    dist.destroy_process_group()
    return weakref.ref(group)


def train_often() -> int:
    """How many of the groups are still in memory; torch itself keeps the last one."""
    with busy_core():
        groups = [train_and_destroy() for _ in range(NUM_TIMES)]
    gc.collect()
    return sum(group() is not None for group in groups)


@pytest.mark.timeout(60)
def test_destroyed_groups_neither_hang_nor_stay() -> None:
    """Their destructor would wait for gloo's threads with Python's lock held, which those may be waiting for."""
    results = ddpilot.Launcher(nproc_per_node=2, timeout_s=45, watch=False).run(train_often)
    assert max(results) <= 1
