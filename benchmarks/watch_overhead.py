# SPDX-License-Identifier: Apache-2.0
"""What watch and guard cost a training step: 2 ranks, DDP over gloo, some 20 ms a step, watched and not, in turn.

Both sides run in the same processes, a block of steps each, in changing order, so that what else the machine does hits
both alike. A block is as the middle of training is: guard's schedule is part of it, the checks of the first steps are
not. The observer is a thread of the process that launches, as it is for a user, and uses the same cores; it looks only
while a watched block runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import ddpilot
from benchmarks.measure import Row, main, render_values
from ddpilot.guard.hook import install
from ddpilot.module_names import GUARD_PROBES
from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.hook import journal_path, ring_path
from ddpilot.watch.observer import Observer
from ddpilot.watch.options import WatchOptions
from ddpilot.watch.report import Report

NUM_RANKS = 2
NUM_FIRST, NUM_STEPS = 16, 25
WIDTH = 640
STEP_LIMIT = 1.02
BEGIN, END = b"b", b"e"

Block = tuple[float, float, float]
"""Wall-clock milliseconds of a step and of its median, and milliseconds of processor time of this rank."""


def watch(folder: Path, pipe: int | None) -> Callable[[], None]:
    """Record and guard this rank as a launch does, and have the observer look; returns what ends that."""
    rank = dist.get_rank()
    recording = start_recording(ring_path(folder, rank), rank=rank)
    stop_guard = install(journal_path(folder, rank), rank=rank, probes=GUARD_PROBES)
    dist.barrier()
    if pipe is not None:
        os.write(pipe, BEGIN)

    def stop() -> None:
        if pipe is not None:
            os.write(pipe, END)
        stop_guard()
        recording.stop()

    return stop


def run_block(net: torch.nn.Module, begin: Callable[[], Callable[[], None]]) -> Block:
    """Train a new DDP model around `net`."""
    stop = begin()
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    took: list[float] = []
    used_s = 0.0
    for step in range(NUM_FIRST + NUM_STEPS):
        batch = torch.randn(96, WIDTH)
        if step == NUM_FIRST:
            dist.barrier()
            used_s = time.process_time()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        took.append((time.perf_counter() - start) * 1e3)
    used_ms = (time.process_time() - used_s) * 1e3 / NUM_STEPS
    dist.barrier()
    stop()
    return statistics.mean(took[NUM_FIRST:]), statistics.median(took[NUM_FIRST:]), used_ms


def train(folder: str, rounds: int) -> list[dict[bool, Block]]:
    """Of each pair of blocks both sides, by whether it was watched; the first pair warms everything up."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers)
    torch.manual_seed(dist.get_rank())
    pipe = os.open(Path(folder) / "pipe", os.O_WRONLY) if dist.get_rank() == 0 else None
    sides = {True: lambda: watch(Path(folder), pipe), False: lambda: lambda: None}
    pairs = []
    for number in range(-1, rounds):
        order = (True, False) if number % 2 else (False, True)
        pairs.append({is_watched: run_block(net, sides[is_watched]) for is_watched in order})
    if pipe is not None:
        os.close(pipe)
    dist.barrier()
    dist.destroy_process_group()
    return pairs[1:]


class Looking:
    """The observer, how long it was to look, and how much processor time that took."""

    def __init__(self, folder: Path) -> None:
        self.findings: list[str] = []
        self.looked_s = self.used_s = 0.0
        self._observer = Observer(
            folder, NUM_RANKS, facts=dict, notify=self._hear, options=WatchOptions(), name="watch_overhead"
        )

    def _hear(self, report: Report) -> None:
        self.findings += [*(finding.code for finding in report.findings), *report.notes]

    def follow(self, path: Path) -> None:
        """Look when the ranks say so, until they are done."""
        self._observer.start(is_paused=True)
        ident = self._observer._thread.ident
        assert ident is not None
        clock, begun_s = time.pthread_getcpuclockid(ident), 0.0
        with open(path, "rb", buffering=0) as pipe:
            while word := pipe.read(1):
                if word == BEGIN:
                    begun_s = time.monotonic()
                    self._observer.resume(time.monotonic_ns(), lambda: None)
                else:
                    self.looked_s += time.monotonic() - begun_s
                    self._observer.pause(reports=False)
        self.used_s = time.clock_gettime(clock)
        self._observer.stop()


@contextmanager
def observed() -> Iterator[tuple[Path, Looking]]:
    """A folder whose rings are looked at while the ranks ask for it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.mkfifo(folder / "pipe")
        looking = Looking(folder)
        thread = threading.Thread(target=looking.follow, args=(folder / "pipe",), daemon=True)
        thread.start()
        yield folder, looking
        thread.join()


def measure(rounds: int) -> list[Row]:
    """The bar in wall-clock time and in processor time, and what the observer uses."""
    env = {"OMP_NUM_THREADS": "1"}
    launcher = ddpilot.Launcher(nproc_per_node=NUM_RANKS, watch=False, env=env, preload=("torch._dynamo",))
    with observed() as (folder, looking):
        by_rank = launcher.run(train, str(folder), rounds)
    if looking.findings:
        print(f"found in a right program: {looking.findings}", file=sys.stderr)
    rounds_of_ranks = list(zip(*by_rank, strict=True))
    joins: dict[str, Callable[[list[float]], float]] = {
        "wall-clock time": max,
        "wall-clock time of the median step": max,
        "processor time": statistics.mean,
    }
    rows = []
    for at, (what, join) in enumerate(joins.items()):
        pairs = [[join([rank[side][at] for rank in ranks]) for side in (True, False)] for ranks in rounds_of_ranks]
        rows.append(step_row(what, pairs))
    share = looking.used_s / looking.looked_s
    observer = Row(
        what="the observer, processor time per second of training",
        ours=f"{share * 1e3:.1f} ms",
        peer="",
        ratio=f"{share:.3f} of a core",
        bar=f"<= {STEP_LIMIT - 1:.2f} of a core",
        holds=share <= STEP_LIMIT - 1,
    )
    return [*rows, observer]


def step_row(what: str, pairs: Sequence[Sequence[float]]) -> Row:
    """The row of one measure of a step, `pairs` of it watched and not."""
    ratios = [watched / bare for watched, bare in pairs]
    ratio = statistics.median(ratios)
    return Row(
        what=f"a step of DDP, {NUM_RANKS} ranks, watched and guarded (peer: neither), {what}",
        ours=render_values([watched for watched, _ in pairs], "ms"),
        peer=render_values([bare for _, bare in pairs], "ms"),
        ratio=f"{ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
        bar=f"<= {STEP_LIMIT}",
        holds=ratio <= STEP_LIMIT,
    )


if __name__ == "__main__":
    sys.exit(main(measure, rounds=15))
