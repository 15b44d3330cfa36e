# SPDX-License-Identifier: Apache-2.0
"""32 ranks on 2 cores that train a DDP model: the first launch of a process against the next one.

What each rank would import by itself is imported once, before they are forked.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import torch
import torch.distributed as dist

import ddpilot
from benchmarks.measure import Row, main, render_values, seconds

NUM_RANKS = 32
NUM_CORES = 2
EXTRA_LIMIT_S = 5.0
MAX_STATUS_LINES = 1


def train() -> None:
    """What every rank does: a group, a DDP model, an optimizer, three updates."""
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


def launch_twice() -> None:
    """Print the seconds of a cold launch and of a warm one; ddpilot's own lines go to stderr."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    for _ in range(2):
        taken_s = seconds(lambda: ddpilot.launch(train, nproc_per_node=NUM_RANKS))
        print(taken_s, flush=True)
        print("launched", file=sys.stderr, flush=True)


def measure(rounds: int) -> list[Row]:
    """The bar: at most 5 s more for the cold launch, and one line about the ranks that are still to come."""
    cold, warm, num_lines = [], [], []
    for _ in range(rounds):
        argv = [sys.executable, "-m", "benchmarks.many_ranks", "--one"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        first_s, second_s = map(float, done.stdout.split())
        cold.append(first_s)
        warm.append(second_s)
        launches = done.stderr.split("launched\n")[:2]
        num_lines.append(max(text.count("ddpilot: ") for text in launches))
    extra_s = statistics.median(first_s - second_s for first_s, second_s in zip(cold, warm, strict=True))
    return [
        Row(
            what=f"cold launch of {NUM_RANKS} ranks on {NUM_CORES} cores, a DDP model; status lines",
            ours=f"{render_values(cold)}, {max(num_lines)} lines",
            peer=f"warm launch {render_values(warm)}",
            ratio=f"{extra_s:+.1f} s",
            bar="at most 5 s longer, 1 line",
            holds=extra_s <= EXTRA_LIMIT_S and max(num_lines) <= MAX_STATUS_LINES,
        )
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        launch_twice()
    else:
        sys.exit(main(measure, rounds=3))
