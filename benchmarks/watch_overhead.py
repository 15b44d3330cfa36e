# SPDX-License-Identifier: Apache-2.0
"""What watch and guard cost a training step: 2 ranks, DDP over gloo, some 20 ms a step, watched and not, in turn.

Each pair is two launches, one after the other, in changing order; of each launch the median step counts. The observer
is outside and uses the same cores.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

import ddpilot
from benchmarks.measure import Row, main, render_values

NUM_RANKS = 2
NUM_WARM = 10
NUM_STEPS = 30
WIDTH = 640
STEP_LIMIT = 1.02


def train() -> float:
    """Milliseconds of the median step on this rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    took = []
    for step in range(NUM_WARM + NUM_STEPS):
        batch = torch.randn(96, WIDTH, generator=generator)
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if step >= NUM_WARM:
            took.append((time.perf_counter() - start) * 1e3)
    del model  # once the group is gone, gloo may wait for ever where a model still held it
    dist.barrier()
    dist.destroy_process_group()
    return statistics.median(took)


def run(watch: bool) -> float:
    """Milliseconds of the median step of the slower rank."""
    launcher = ddpilot.Launcher(
        nproc_per_node=NUM_RANKS, watch=watch, env={"OMP_NUM_THREADS": "1"}, preload=("torch._dynamo",)
    )
    return float(max(launcher.run(train)))


def measure(rounds: int) -> list[Row]:
    """The bar, after one launch of each kind that warms the rank server up."""
    pairs = []
    for number in range(-1, rounds):
        sides = {watch: run(watch) for watch in ((True, False) if number % 2 else (False, True))}
        if number >= 0:
            pairs.append((sides[True], sides[False]))
    ratios = [watched / bare for watched, bare in pairs]
    ratio = statistics.median(ratios)
    return [
        Row(
            what=f"a step of DDP, {NUM_RANKS} ranks, watched and guarded (peer: `watch=False`)",
            ours=render_values([watched for watched, _ in pairs], "ms"),
            peer=render_values([bare for _, bare in pairs], "ms"),
            ratio=f"{ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
            bar=f"<= {STEP_LIMIT}",
            holds=ratio <= STEP_LIMIT,
        )
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=15))
