# SPDX-License-Identifier: Apache-2.0
"""What a training step costs around the model: `Loop` against a loop by hand and three libraries, 1 and 2 ranks.

A tiny model shows the libraries' own time; a step of 10 ms what of it remains in practice. All take many short turns in
the same ranks, each time in another order, so that what else the machine does hits them alike; a ratio is that of two
neighbouring turns, and what is said of it is the median of all turns, with the quarters below and above it. Beside it
stands the ratio of processor time, of all threads of all ranks: it does not grow where a rank waits for a core, or for
the other rank, which on two busy cores is most of a short step.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import ddpilot
from benchmarks.measure import Row, main, render_ratio, render_values
from benchmarks.step_loops import LOOPS, Epoch, Job, Moment, by_ddpilot, by_hand, let_peers_import

WARM_UP = 20
"""First steps of an epoch, not counted."""
NUM_STEPS = WARM_UP + 64
"""`Loop` exchanges flags with every 32nd of short updates: twice in what is counted."""
NUM_LONG_STEPS = WARM_UP + 20
LONG_STEP_S = 0.010
LONG_LIMIT = 1.03
TINY_ROUNDS = {1: 1, 2: 4}
"""Times as many by number of ranks: how long two ranks wait for each other scatters several times as much."""

Taken = dict[str, list[Moment]]
"""Microseconds of a step in each turn, of the clock and of processor time, by loop."""


def step_us(stamps: Sequence[Moment]) -> Moment:
    """Microseconds per step, from the moments at which steps began."""
    num = len(stamps) - 1 - WARM_UP
    clock_s, cpu_s = (end - begin for begin, end in zip(stamps[WARM_UP], stamps[-1], strict=True))
    return clock_s / num * 1e6, cpu_s / num * 1e6


def enter_group() -> None:
    """The process group that all loops use; collection of garbage is as a program has it."""
    torch.set_num_threads(1)
    let_peers_import()
    ddpilot.init_group("gloo")


def take_turns(epochs: dict[str, Epoch], rounds: int) -> Taken:
    """An epoch of each by turns; the first turn is not counted."""
    taken: Taken = {name: [] for name in epochs}
    names = list(epochs)
    for turn in range(rounds + 1):
        for name in names:
            dist.barrier()
            taken[name] += [step_us(epochs[name]())][: turn > 0]
        names = names[::-1] if turn % 2 else [*names[1:], names[0]]
    return taken


def measure_tiny(rounds: int) -> Taken:
    """Of a step that is nothing but overhead."""
    enter_group()
    return take_turns({name: make(Job(NUM_STEPS, 0)) for name, make in LOOPS.items()}, rounds)


def matmuls_of(duration_s: float) -> int:
    """How many products of 256 x 256 matrices take so long here, the same number on all ranks."""
    matrix = torch.full((256, 256), 1 / 256)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(10):
            matrix = matrix @ matrix
        best = min(best, (time.perf_counter() - start) / 10)
    number = torch.tensor([duration_s / best])
    dist.all_reduce(number)
    return max(1, round(number.item() / dist.get_world_size()))


def measure_long(rounds: int) -> Taken:
    """Of a step of `LONG_STEP_S` seconds, ours and by hand."""
    enter_group()
    job = Job(NUM_LONG_STEPS, matmuls_of(LONG_STEP_S))
    return take_turns({"by hand": by_hand(job), "ddpilot": by_ddpilot(job)}, rounds)


def run(what: Callable[[int], Taken], num_ranks: int, rounds: int) -> Taken:
    """On `num_ranks` ranks: the time of rank 0, which is that of all, and the mean of their processor times."""
    ranks = list(ddpilot.Launcher(nproc_per_node=num_ranks, env={"OMP_NUM_THREADS": "1"}).run(what, rounds))
    return {
        name: [
            (turns[0][0], statistics.fmean(cpu for _, cpu in turns))
            for turns in zip(*(taken[name] for taken in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def ratios(taken: Taken, to: str) -> tuple[list[float], list[float]]:
    """Of ddpilot to another loop, turn by turn: of time, and of processor time."""
    pairs = list(zip(taken["ddpilot"], taken[to], strict=True))
    return [ours[0] / theirs[0] for ours, theirs in pairs], [ours[1] / theirs[1] for ours, theirs in pairs]


def make_row(what: str, taken: Taken, to: str, limit: float | None, unit: str) -> Row:
    """One line of the table, against the loop `to`."""
    clock, cpu = ratios(taken, to)
    scale = {"us": 1.0, "ms": 1e-3}[unit]
    times = {name: [clock_us * scale for clock_us, _ in taken[name]] for name in ("ddpilot", to)}
    return Row(
        what=f"{what}, against {to}",
        ours=render_values(times["ddpilot"], unit),
        peer=render_values(times[to], unit),
        ratio=f"{render_ratio(clock)}; processor time {render_ratio(cpu)}",
        bar="none" if limit is None else f"below {limit:g}",
        holds=limit is None or statistics.median(clock) < limit,
    )


def measure(rounds: int) -> list[Row]:
    """One row per peer and number of ranks, and those of the long step. The loop by hand has a bar there only."""
    rows = []
    numbers = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
    of = {num: f"{num} rank{'s' if num > 1 else ''}" for num in numbers}
    for num in numbers:
        taken = run(measure_tiny, num, rounds * TINY_ROUNDS[num])
        for peer in (name for name in LOOPS if name != "ddpilot"):
            limit = None if peer == "by hand" else 1.0
            rows.append(make_row(f"a step of a tiny model, {of[num]}", taken, peer, limit, "us"))
    for num in numbers:
        taken = run(measure_long, num, rounds)
        what = f"a step of {LONG_STEP_S * 1e3:.0f} ms, {of[num]}"
        rows.append(make_row(what, taken, "by hand", LONG_LIMIT, "ms"))
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, rounds=40))
