# SPDX-License-Identifier: Apache-2.0
"""From the call to the results of 2 ranks that enter a group and all_reduce once, against torch.multiprocessing.spawn.

Warm: the rank server runs. Cold: the first launch of a process that has imported torch and ddpilot, as a notebook has.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn as torch_spawn

import ddpilot
from benchmarks.measure import Row, alternate, main, render_values, seconds

NUM_RANKS = 2
WARM_LIMIT_S = 0.35
WARM_FACTOR = 10.0
COLD_FACTOR = 2.0


def all_reduce_once(rank: int | None = None, port: int = 0) -> None:
    """What every rank does. `rank` and `port` are given by spawn; a launch sets them in the environment."""
    if rank is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == NUM_RANKS
    dist.destroy_process_group()


def launch() -> None:
    """One launch of ours."""
    ddpilot.launch(all_reduce_once, nproc_per_node=NUM_RANKS)


def spawn() -> None:
    """One launch of the peer's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch_spawn(all_reduce_once, args=(port,), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]


def cold(which: str) -> float:
    """Seconds of the first launch of a fresh process."""
    argv = [sys.executable, "-m", "benchmarks.launch_latency", "--one", which]
    return float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[-1])


def measure(rounds: int) -> list[Row]:
    """Both bars; one unmeasured launch warms the rank server up."""
    launch()
    warm, spawned = alternate(lambda: seconds(launch), lambda: seconds(spawn), rounds)
    cold_launches, cold_spawns = alternate(lambda: cold("launch"), lambda: cold("spawn"), max(3, rounds // 2))
    warm_s, factor = statistics.median(warm), statistics.median(spawned) / statistics.median(warm)
    cold_factor = statistics.median(cold_spawns) / statistics.median(cold_launches)
    return [
        Row(
            what="warm launch, 2 ranks, one all_reduce",
            ours=render_values(warm),
            peer=f"spawn {render_values(spawned)}",
            ratio=f"1/{factor:.0f}",
            bar="at most 0.35 s and 1/10",
            holds=warm_s <= WARM_LIMIT_S and factor >= WARM_FACTOR,
        ),
        Row(
            what="cold launch, 2 ranks, one all_reduce",
            ours=render_values(cold_launches),
            peer=f"spawn {render_values(cold_spawns)}",
            ratio=f"1/{cold_factor:.1f}",
            bar="at most 1/2",
            holds=cold_factor >= COLD_FACTOR,
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(seconds({"launch": launch, "spawn": spawn}[sys.argv[2]]))
    else:
        sys.exit(main(measure, rounds=7))
