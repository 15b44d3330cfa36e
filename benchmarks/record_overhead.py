# SPDX-License-Identifier: Apache-2.0
"""What recording costs: one all_reduce with its user's line written down, and a DDP step on 2 ranks, against without.

The cost of one collective is taken in a group of one rank: between two, waiting for the other hides it. All sides run
in turn in the same processes: with and without recording, and with a kernel in the same place that only goes on, which
is the least for any Python code that sees every collective. With torch's backend that does nothing, and with gloo,
whose thread the caller waits for and finds its caches cold.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddpilot
from benchmarks.measure import Row, main, render_values
from ddpilot.record.collectives.start_stop import start_recording

COST_LIMIT_US = 15.0
STEP_LIMIT = 1.02
NUM_CALLS = 500
NUM_STEPS = 12


Watch = Callable[[], Callable[[], None]]
"""Begins to watch the collectives of this process, and returns what ends it."""


def reduce_often(tensor: torch.Tensor) -> None:
    """The loop that is measured; its line is what the ring holds."""
    for _ in range(NUM_CALLS):
        dist.all_reduce(tensor)


def watch_nothing() -> Callable[[], None]:
    """The side without."""
    return lambda: None


def watch_by_empty_kernel() -> Callable[[], None]:
    """A kernel of all_reduce that only goes on, where `record` has its own."""
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    redispatch = torch.ops.c10d.allreduce_.default._handle.redispatch_boxed
    library.impl(
        "allreduce_", lambda keyset, *args: redispatch(keyset & rest, *args), "BackendSelect", with_keyset=True
    )
    destroy: Callable[[], None] = library._destroy
    return destroy


def record_into(folder: str) -> Watch:
    """The side that records."""
    rank = int(os.environ["RANK"])
    return lambda: start_recording(Path(folder) / str(rank), rank=rank).stop


def seconds_of(function: Callable[[], object], watch: Watch) -> float:
    """Wall-clock seconds that `function` takes while `watch` watches."""
    stop = watch()
    function()  # not measured: what is written down once per line, and what a pause before has cooled down
    start = time.perf_counter()
    function()
    took = time.perf_counter() - start
    stop()
    return took


def rounds_of(function: Callable[[], object], watches: Sequence[Watch], rounds: int) -> list[list[float]]:
    """Seconds under each of `watches`, `rounds` times; the order changes."""
    results = []
    for number in range(rounds):
        order = range(len(watches)) if number % 2 else reversed(range(len(watches)))
        took = {at: seconds_of(function, watches[at]) for at in order}
        results.append([took[at] for at in range(len(watches))])
    return results


def measure_calls(folder: str, rounds: int, backend: str) -> list[list[float]]:
    """Microseconds of one all_reduce in a group of one rank: alone, with an empty kernel, recorded."""
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    else:
        dist.init_process_group(backend)
    tensor = torch.ones(10)
    watches = (watch_nothing, watch_by_empty_kernel, record_into(folder))
    results = rounds_of(lambda: reduce_often(tensor), watches, rounds)
    dist.destroy_process_group()
    return [[seconds / NUM_CALLS * 1e6 for seconds in result] for result in results]


def measure_steps(folder: str, rounds: int) -> list[list[float]]:
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

    results = rounds_of(steps, (watch_nothing, record_into(folder)), rounds)
    dist.destroy_process_group()
    return [[seconds / NUM_STEPS * 1e3 for seconds in result] for result in results]


def call_row(results: Sequence[Sequence[float]], what: str) -> Row:
    """The row of `measure_calls`; its bar is about the difference."""
    bare, *others = ([result[at] for result in results] for at in range(3))
    floors, costs = ([with_it - without for with_it, without in zip(other, bare, strict=True)] for other in others)
    return Row(
        what=what,
        ours=render_values(others[-1], "us"),
        peer=f"without: {render_values(bare, 'us')}; an empty kernel of Python code: +{render_values(floors, 'us')}",
        ratio=f"+{render_values(costs, 'us')}",
        bar=f"+{COST_LIMIT_US:.0f} us",
        holds=statistics.median(costs) <= COST_LIMIT_US,
    )


def launch(num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """What the ranks return, which record by themselves alone."""
    return ddpilot.Launcher(nproc_per_node=num_ranks, watch=False).run(function, *args)


def measure(rounds: int) -> list[Row]:
    """Both bars."""
    with tempfile.TemporaryDirectory() as folder:
        idle, blocking = (launch(1, measure_calls, folder, rounds, backend)[0] for backend in ("fake", "gloo"))
        steps = launch(2, measure_steps, folder, rounds)[0]
    ratios = [recorded / bare for bare, recorded in steps]
    ratio = statistics.median(ratios)
    return [
        call_row(idle, "one all_reduce, recorded with its line, of a backend that does nothing"),
        call_row(blocking, "one all_reduce of gloo, 1 rank, whose end the caller waits for"),
        Row(
            what="one DDP step, recorded, 2 ranks",
            ours=render_values([recorded for _, recorded in steps], "ms"),
            peer=f"without: {render_values([bare for bare, _ in steps], 'ms')}",
            ratio=f"{ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
            bar=f"{STEP_LIMIT}",
            holds=ratio <= STEP_LIMIT,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=21))
