# SPDX-License-Identifier: Apache-2.0
"""50 launches after a matmul and a backward in the parent: how many hang, and what is left after them.

The peer is torch.multiprocessing with fork, which is what launchers do that see functions defined in cells: once, since
it hangs; it is stopped after 10 seconds.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import uuid

import torch
from torch.multiprocessing.spawn import start_processes

import ddpilot
from benchmarks.leftovers import MARK, look, settle
from benchmarks.measure import Row, main, render_values, seconds
from ddpilot.launching.rank_server.client import server_pids, stop_servers

NUM_RANKS = 2
HANG_S = 10.0


def use_torch() -> None:
    """A matmul and a backward: afterwards the pool of OpenMP threads lives in this process."""
    weights = torch.randn(1000, 1000, requires_grad=True)
    (weights @ weights).sum().backward()  # type: ignore[no-untyped-call]


def train(rank: int = 0) -> None:  # noqa: ARG001 - spawn gives it
    """What every rank does: the same, with its own pool."""
    torch.set_num_threads(2)
    use_torch()


def fork_hangs() -> bool:
    """Whether forked ranks are still busy after 10 seconds; they are killed then."""
    context = start_processes(train, nprocs=NUM_RANKS, join=False, start_method="fork")  # type: ignore[no-untyped-call]
    end = time.monotonic() + HANG_S
    while not context.join(timeout=0.5) and time.monotonic() < end:
        pass
    stuck = [process for process in context.processes if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    return bool(stuck)


def measure(rounds: int) -> list[Row]:
    """The bar: no launch hangs, and nothing is left, first beside the warm server and then also of it."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    use_torch()
    before = look(mark, everywhere=True)
    launcher = ddpilot.Launcher(nproc_per_node=NUM_RANKS, timeout_s=HANG_S, output="silent")
    taken = []
    hung = 0
    for _ in range(rounds):
        try:
            taken.append(seconds(lambda: launcher.run(train)))
        except ddpilot.LaunchTimeoutError:
            hung += 1
    warm = settle(lambda: look(mark, spared_pids=server_pids(), everywhere=True).since(before), grace_s=2)
    warm = [entry for entry in warm if not entry.startswith("file descriptors") or "socket:" not in entry]
    stop_servers()
    left = settle(lambda: look(mark, everywhere=True).since(before), grace_s=2)
    for entry in {*warm, *left}:
        print(f"left: {entry}", file=sys.stderr)
    return [
        Row(
            what=f"{rounds} launches after matmul and backward: hung, left over",
            ours=f"{hung} hung, {len({*warm, *left})} left, each {render_values(taken)}",
            peer="fork: hung" if fork_hangs() else "fork: did not hang",
            ratio=f"median {statistics.median(taken):.2f} s",
            bar="0 and 0",
            holds=not hung and not warm and not left,
        )
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=50))
