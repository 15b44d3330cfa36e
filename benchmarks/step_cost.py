# SPDX-License-Identifier: Apache-2.0
"""What a training step costs around the model: `Loop` against a loop by hand and three libraries, 1 and 2 ranks.

A tiny model shows the libraries' own time; a step of 10 ms what of it remains in practice. All take turns in the same
processes, epoch by epoch, so that what else the machine does hits them alike; ratios are taken within a turn.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

import ddpilot
from benchmarks.measure import Row, main, render_values
from benchmarks.step_loops import LOOPS, Job, by_ddpilot, by_hand, let_peers_import

WARM_UP = 20
"""First steps of an epoch, not counted."""
NUM_STEPS = 170
NUM_LONG_STEPS = 60
LONG_STEP_S = 0.010
LONG_LIMIT = 1.03


def step_us(stamps: Sequence[float]) -> float:
    """Microseconds per step, from the moments at which steps began."""
    return (stamps[-1] - stamps[WARM_UP]) / (len(stamps) - 1 - WARM_UP) * 1e6


def enter_group() -> None:
    """The process group that all loops use; collection of garbage is as a program has it."""
    torch.set_num_threads(1)
    let_peers_import()
    ddpilot.init_group("gloo")


def measure_tiny(rounds: int, names: Sequence[str]) -> dict[str, list[float]]:
    """Microseconds per step of each loop, by turns."""
    enter_group()
    epochs = {name: LOOPS[name](Job(NUM_STEPS, 0)) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name, epoch in epochs.items():
            dist.barrier()
            taken[name] += [step_us(epoch())][: turn > 0]  # the first turn is not counted
    return taken


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


def measure_long(rounds: int) -> dict[str, list[float]]:
    """The same for a step of `LONG_STEP_S` seconds, ours and by hand."""
    enter_group()
    job = Job(NUM_LONG_STEPS, matmuls_of(LONG_STEP_S))
    epochs = {"by hand": by_hand(job), "ddpilot": by_ddpilot(job)}
    taken: dict[str, list[float]] = {name: [] for name in epochs}
    for turn in range(rounds + 1):
        for name in list(epochs)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            taken[name] += [step_us(epochs[name]())][: turn > 0]
    return taken


def ratios(taken: dict[str, list[float]], name: str, to: str) -> list[float]:
    """Of `name` to another loop, turn by turn."""
    return [ours / theirs for ours, theirs in zip(taken[name], taken[to], strict=True)]


def render_ratios(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def tiny_rows(num_ranks: int, rounds: int) -> list[Row]:
    """One row per peer, and one against the loop by hand, which has no bar of its own."""
    launcher = ddpilot.Launcher(nproc_per_node=num_ranks, env={"OMP_NUM_THREADS": "1"})
    taken = launcher.run(measure_tiny, rounds, list(LOOPS))[0]
    ours = f"{render_values(taken['ddpilot'], 'us')}, least {min(taken['ddpilot']):.0f}"
    rows = []
    for name in (name for name in LOOPS if name != "ddpilot"):
        by_turn = ratios(taken, "ddpilot", name)
        is_peer = name != "by hand"
        rows.append(
            Row(
                what=f"a step of a tiny model, {num_ranks} rank{'s' if num_ranks > 1 else ''}, against {name}",
                ours=ours,
                peer=f"{render_values(taken[name], 'us')}, least {min(taken[name]):.0f}",
                ratio=render_ratios(by_turn),
                bar="below 1" if is_peer else "none",
                holds=not is_peer or statistics.median(by_turn) < 1,
            )
        )
    return rows


def long_row(num_ranks: int, rounds: int) -> Row:
    """The bar of the 10 ms step."""
    launcher = ddpilot.Launcher(nproc_per_node=num_ranks, env={"OMP_NUM_THREADS": "1"})
    taken = launcher.run(measure_long, rounds)[0]
    by_turn = ratios(taken, "ddpilot", "by hand")
    in_ms = {name: [value / 1e3 for value in values] for name, values in taken.items()}
    return Row(
        what=f"a step of {LONG_STEP_S * 1e3:.0f} ms, {num_ranks} rank{'s' if num_ranks > 1 else ''}",
        ours=render_values(in_ms["ddpilot"], "ms"),
        peer=f"by hand: {render_values(in_ms['by hand'], 'ms')}",
        ratio=render_ratios(by_turn),
        bar=f"{LONG_LIMIT}",
        holds=statistics.median(by_turn) <= LONG_LIMIT,
    )


def measure(rounds: int) -> list[Row]:
    """All rows."""
    numbers = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
    tiny = [row for num in numbers for row in tiny_rows(num, rounds)]
    return tiny + [long_row(num, rounds) for num in numbers]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=21))
