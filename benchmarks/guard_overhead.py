# SPDX-License-Identifier: Apache-2.0
"""What guard costs: a full check of 10 million parameters, and a DDP step of about 20 ms on 2 ranks against without.

Both sides run in turn in the same processes. A step is measured as it is in the middle of training: the schedule is
part of it, with a check every 25 steps. The check is set against reading the same parameters once (`norms alone`),
below which no check can be.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import ddpilot
from benchmarks.measure import Row, main, render_values
from ddpilot.guard.hook import install
from ddpilot.guard.probes.parameters.fingerprint import Fingerprinter
from ddpilot.module_names import GUARD_PROBES
from ddpilot.record.accelerator import HostCopies
from ddpilot.record.collectives.start_stop import start_recording

CHECK_LIMIT_MS = 3.0
STEP_LIMIT = 1.02
NUM_FIRST, NUM_STEPS = 6, 25
WIDTH, NUM_LAYERS, BATCH = 640, 6, 128
SHAPES = {"10 tensors": [(1000, 1000)] * 10, "300 tensors": [(256, 130)] * 300}


def seconds_of(function: Callable[[], object]) -> float:
    """Wall-clock seconds."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_checks(shapes: Sequence[tuple[int, int]], rounds: int) -> list[list[float]]:
    """Milliseconds for 10 million parameters with their gradients: reading them once, a full check."""
    torch.set_num_threads(1)
    parameters: list[torch.Tensor] = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    num = sum(parameter.numel() for parameter in parameters)
    fingerprinter, copies = Fingerprinter(parameters), HostCopies()
    results = []
    for _ in range(rounds + 1):
        with torch.no_grad():
            norms_s = seconds_of(lambda: torch._foreach_norm(parameters))
        check_s = seconds_of(lambda: fingerprinter.begin(copies).fingerprint())
        results.append([seconds * 1e3 * 1e7 / num for seconds in (norms_s, check_s)])
    return results[1:]


def measure_steps(folder: str, rounds: int) -> list[list[float]]:
    """Milliseconds of one training step of a DDP model: bare, with the ring, with the ring and all probes."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers)
    place = Path(folder) / str(dist.get_rank())
    watches = (watch_nothing, record_into(place), guard_into(place))
    results = []
    for number in range(rounds):
        order = range(3) if number % 2 else reversed(range(3))
        took = {side: step_ms(net, watches[side]) for side in order}
        results.append([took[side] for side in range(3)])
    dist.destroy_process_group()
    return results


Watch = Callable[[], Callable[[], None]]
"""Begins to watch this process, and returns what ends it."""


def watch_nothing() -> Callable[[], None]:
    """The side without."""
    return lambda: None


def record_into(place: Path) -> Watch:
    """The ring alone."""
    return lambda: start_recording(place.with_suffix(".ring"), rank=dist.get_rank()).stop


def guard_into(place: Path) -> Watch:
    """The ring and every probe."""

    def watch() -> Callable[[], None]:
        stop_recording = record_into(place)()
        stop_probes = install(place.with_suffix(".journal"), rank=dist.get_rank(), probes=GUARD_PROBES)

        def stop() -> None:
            stop_probes()
            stop_recording()

        return stop

    return watch


def step_ms(net: torch.nn.Module, watch: Watch) -> float:
    """Milliseconds of a step under `watch`, after the first ones, each of which is checked."""
    stop = watch()
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(BATCH, WIDTH)

    def steps(num: int) -> None:
        for _ in range(num):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    steps(NUM_FIRST)
    took_s = seconds_of(lambda: steps(NUM_STEPS))
    stop()
    return took_s / NUM_STEPS * 1e3


def check_row(what: str, results: Sequence[Sequence[float]]) -> Row:
    """The row of `measure_checks`."""
    norms, checks = ([result[side] for result in results] for side in (0, 1))
    return Row(
        what=f"guard's full check of 10 million parameters and their gradients, {what}, one thread",
        ours=render_values(checks, "ms"),
        peer=f"norms alone: {render_values(norms, 'ms')}",
        ratio=f"{statistics.median(checks) / statistics.median(norms):.2f}",
        bar=f"{CHECK_LIMIT_MS:.0f} ms",
        holds=statistics.median(checks) <= CHECK_LIMIT_MS,
    )


def step_row(what: str, results: Sequence[Sequence[float]], side: int, bar: float) -> Row:
    """The row of one side of `measure_steps` against the bare step."""
    ratios = [result[side] / result[0] for result in results]
    ratio = statistics.median(ratios)
    return Row(
        what=f"one DDP step on 2 ranks with {what}",
        ours=render_values([result[side] for result in results], "ms"),
        peer=f"without: {render_values([result[0] for result in results], 'ms')}",
        ratio=f"{ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
        bar=f"{bar}",
        holds=ratio <= bar,
    )


def measure(rounds: int) -> list[Row]:
    """All bars."""
    launcher = ddpilot.Launcher(nproc_per_node=2, watch=False, preload=("torch._dynamo",))
    with tempfile.TemporaryDirectory() as folder:
        steps = launcher.run(measure_steps, folder, rounds)[0]
    return [
        *(check_row(what, measure_checks(shapes, rounds)) for what, shapes in SHAPES.items()),
        step_row("the ring", steps, 1, STEP_LIMIT),
        step_row("the ring and guard", steps, 2, STEP_LIMIT),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=21))
