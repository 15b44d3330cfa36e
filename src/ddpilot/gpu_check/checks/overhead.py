# SPDX-License-Identifier: Apache-2.0
"""Measure the overhead of watch and guard in a training step of 20 ms."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.gpu_check.catalogue import Outcome, judge
from ddpilot.gpu_check.checks.accelerator import backend_of, join_pair, run_ranks, wait_for
from ddpilot.guard.hook import install
from ddpilot.module_names import GUARD_PROBES
from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.hook import journal_path, ring_path

_STEP_MS = 20.0
_BAR = 1.05
_NUM_FIRST, _NUM_STEPS, _NUM_PAIRS = 16, 50, 8
_WIDTHS, _MAX_LAYERS = (256, 512, 1024, 2048, 4096), 64


def overhead_on_one_rank() -> Outcome:
    """Watch and guard add at most 5 % to a step of 20 ms on one rank."""
    return _judge_overhead(1)


def overhead_on_a_pair() -> Outcome:
    """Watch and guard add at most 5 % to a step of 20 ms on two ranks."""
    return _judge_overhead(2)


def _judge_overhead(num_ranks: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        env = {"OMP_NUM_THREADS": "1"}
        ranks = list(run_ranks(_measure, folder, num_ranks=num_ranks, watch=False, env=env, timeout_s=150))
    backend = ranks[0][0]
    pairs = [tuple(max(side) for side in zip(*pair, strict=True)) for pair in zip(*(r[1] for r in ranks), strict=True)]
    ratios = [watched / bare for watched, bare in pairs]
    bare_ms = statistics.median(bare for _, bare in pairs)
    ratio = statistics.median(ratios)
    evidence = (
        f"{num_ranks} ranks over {backend}: step {bare_ms:.1f} ms, with watch and guard x {ratio:.3f} "
        f"({min(ratios):.3f}-{max(ratios):.3f}), bar {_BAR}"
    )
    return judge(ratio <= _BAR, evidence)


def _measure(folder: str) -> tuple[str, list[tuple[float, float]]]:
    """Return the backend and, for each pair of blocks, the milliseconds per step with and without watch and guard.

    The order of the two alternates between pairs. A first pair is discarded as warm-up.
    """
    device = join_pair()
    torch.manual_seed(0)
    net = _make_net(device)
    sides: dict[bool, Callable[[], Callable[[], None]]] = {
        True: lambda: _watch(Path(folder)),
        False: lambda: lambda: None,
    }
    pairs = []
    for number in range(-1, _NUM_PAIRS):
        took = {
            is_watched: _run_block(net, device, sides[is_watched]) for is_watched in (number % 2 == 0, number % 2 != 0)
        }
        pairs.append((took[True], took[False]))
    return backend_of(device), pairs[1:]


def _watch(folder: Path) -> Callable[[], None]:
    rank = int(os.environ["RANK"])
    recording = start_recording(ring_path(folder, rank), rank=rank)
    stop_guard = install(journal_path(folder, rank), rank=rank, probes=GUARD_PROBES)

    def stop() -> None:
        stop_guard()
        recording.stop()

    return stop


def _make_net(device: torch.device) -> nn.Sequential:
    """Make a model wide enough to keep the device busy and deep enough for 20 ms, of equal shape on all ranks."""
    for width in _WIDTHS:
        few_ms = _run_block(_make_layers(width, 8, device), device, lambda: lambda: None, num_first=4, num_steps=8)
        shape = torch.tensor([width, min(_MAX_LAYERS, max(2, int(8 * _STEP_MS / few_ms))), few_ms >= _STEP_MS / 4])
        dist.broadcast(shape, src=0)
        if shape[2]:
            break
    return _make_layers(int(shape[0]), int(shape[1]), device)


def _make_layers(width: int, num: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num))).to(device)


def _run_block(
    net: nn.Sequential,
    device: torch.device,
    begin: Callable[[], Callable[[], None]],
    num_first: int = _NUM_FIRST,
    num_steps: int = _NUM_STEPS,
) -> float:
    """Return the milliseconds per step."""
    stop = begin()
    width = next(net.parameters()).shape[0]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    began = 0.0
    for step in range(num_first + num_steps):
        if step == num_first:
            wait_for(device)
            dist.barrier()
            wait_for(device)
            began = time.perf_counter()
        batch = torch.randn(width, width, device=device)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    wait_for(device)
    took_ms = (time.perf_counter() - began) * 1e3 / num_steps
    stop()
    return took_ms
