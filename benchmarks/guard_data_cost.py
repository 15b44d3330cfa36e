# SPDX-License-Identifier: Apache-2.0
"""What guard's probes of data, randomness, losses and checkpoints add to a step: loader, forward, backward, optimizer.

Processor time of the training thread, of a step that computes next to nothing, since the cost does not grow with what
the model computes: with and without in turn, in one process. The bar is 1 % of a step of 20 ms.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpilot
from benchmarks.measure import Row, main, render_values
from ddpilot.guard.hook import install

LIMIT_US = 200.0
BATCH = 32
NUM_STEPS = 60
NUM_EPOCHS = 3
PROBES = (
    "ddpilot.guard.probes.data.probe:DataProbe",
    "ddpilot.guard.probes.saving:SavingProbe",
    "ddpilot.guard.probes.devices:DeviceErrorProbe",
)


def train(data: TensorDataset) -> float:
    """Microseconds of a step: the tenth percentile, which other load disturbs least, without the first half epoch."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(192, 32), torch.nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler: DistributedSampler[object] = DistributedSampler(data)
    took = []
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        batches = iter(DataLoader(data, BATCH, sampler=sampler))
        for _ in range(NUM_STEPS):
            start = time.thread_time()
            x, y = next(batches)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            took.append(time.thread_time() - start)
    return statistics.quantiles(took[NUM_STEPS // 2 :], n=10)[0] * 1e6


def measure_on_rank(folder: str, rounds: int) -> list[tuple[float, float]]:
    """Microseconds of a step without and with, `rounds` times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(BATCH * NUM_STEPS, 192), torch.randint(0, 10, (BATCH * NUM_STEPS,)))
    train(data)
    results = []
    for number in range(rounds):
        pair = {}
        for is_on in (True, False) if number % 2 else (False, True):
            stop: Callable[[], None] = lambda: None  # noqa: E731
            if is_on:
                stop = install(Path(folder) / f"{number}.journal", rank=0, probes=PROBES)
            pair[is_on] = train(data)
            stop()
        results.append((pair[False], pair[True]))
    dist.destroy_process_group()
    return results


def measure(rounds: int) -> list[Row]:
    """The bar."""
    launcher = ddpilot.Launcher(nproc_per_node=1, watch=False)
    with tempfile.TemporaryDirectory() as folder:
        results = launcher.run(measure_on_rank, folder, rounds)[0]
    costs = [with_it - without for without, with_it in results]
    return [
        Row(
            what="one step, with guard's probes of data, randomness, losses and checkpoints",
            ours=render_values([with_it for _, with_it in results], "us"),
            peer=f"without: {render_values([without for without, _ in results], 'us')}",
            ratio=f"+{render_values(costs, 'us')}",
            bar=f"+{LIMIT_US:.0f} us",
            holds=statistics.median(costs) <= LIMIT_US,
        )
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=21))
