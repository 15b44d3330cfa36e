# SPDX-License-Identifier: Apache-2.0
"""What recording costs: one all_reduce with its user's line written down, and a DDP step on 2 ranks, against without.

The cost of one collective is taken in a group of one rank: between two, waiting for the other hides it. Both sides run
in turn in the same processes.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import ddpilot
from benchmarks.measure import Row, main, render_values
from ddpilot.record.recording import start_recording

COST_LIMIT_US = 15.0
STEP_LIMIT = 1.02
NUM_CALLS = 500
NUM_STEPS = 12


def reduce_often(tensor: torch.Tensor) -> None:
    """The loop that is measured; its line is what the ring holds."""
    for _ in range(NUM_CALLS):
        dist.all_reduce(tensor)


def seconds_of(function: Callable[[], object], path: Path | None) -> float:
    """Wall-clock seconds that `function` takes, recorded into `path` where there is one."""
    recording = start_recording(path, rank=int(os.environ["RANK"])) if path else None
    function()  # not measured: what is written down once per line, and what a pause before has cooled down
    start = time.perf_counter()
    function()
    took = time.perf_counter() - start
    if recording:
        recording.stop()
    return took


def pairs_of(function: Callable[[], object], folder: str, rounds: int) -> list[tuple[float, float]]:
    """Seconds with and without recording, `rounds` times; which one comes first changes."""
    path = Path(folder) / os.environ["RANK"]
    pairs = []
    for number in range(rounds):
        if number % 2:
            recorded, bare = seconds_of(function, path), seconds_of(function, None)
        else:
            bare, recorded = seconds_of(function, None), seconds_of(function, path)
        pairs.append((recorded, bare))
    return pairs


def measure_calls(folder: str, rounds: int) -> list[tuple[float, float]]:
    """Microseconds of one all_reduce in a group of one rank."""
    dist.init_process_group("gloo")
    tensor = torch.ones(10)
    pairs = pairs_of(lambda: reduce_often(tensor), folder, rounds)
    dist.destroy_process_group()
    return [(recorded / NUM_CALLS * 1e6, bare / NUM_CALLS * 1e6) for recorded, bare in pairs]


def measure_steps(folder: str, rounds: int) -> list[tuple[float, float]]:
    """Milliseconds of one training step of a DDP model with buffers and several gradient buckets."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = 640
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU()]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, width)

    def steps() -> None:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    pairs = pairs_of(steps, folder, rounds)
    dist.destroy_process_group()
    return [(recorded / NUM_STEPS * 1e3, bare / NUM_STEPS * 1e3) for recorded, bare in pairs]


def measure(rounds: int) -> list[Row]:
    """Both bars."""
    with tempfile.TemporaryDirectory() as folder:
        calls = ddpilot.launch(measure_calls, folder, rounds, nproc_per_node=1)[0]
        steps = ddpilot.launch(measure_steps, folder, rounds, nproc_per_node=2)[0]
    costs = [recorded - bare for recorded, bare in calls]
    ratios = [recorded / bare for recorded, bare in steps]
    cost, ratio = statistics.median(costs), statistics.median(ratios)
    return [
        Row(
            what="one all_reduce, recorded with its line, 1 rank",
            ours=render_values([recorded for recorded, _ in calls], "us"),
            peer=f"without: {render_values([bare for _, bare in calls], 'us')}",
            ratio=f"+{render_values(costs, 'us')}",
            bar=f"+{COST_LIMIT_US:.0f} us",
            holds=cost <= COST_LIMIT_US,
        ),
        Row(
            what="one DDP step, recorded, 2 ranks",
            ours=render_values([recorded for recorded, _ in steps], "ms"),
            peer=f"without: {render_values([bare for _, bare in steps], 'ms')}",
            ratio=f"{ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
            bar=f"{STEP_LIMIT}",
            holds=ratio <= STEP_LIMIT,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=21))
