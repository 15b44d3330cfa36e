# SPDX-License-Identifier: Apache-2.0
"""From nothing to the first all_reduce of 2 ranks that stay, against ipyparallel and nbdistributed; and 16 ranks.

Warm: the rank server runs. Cold: the first session of a process that has imported torch and ddpilot, as a notebook has.
The peers start everything anew each time, in a process that has imported torch and them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.idle_memory import pss_mb
from benchmarks.leftovers import MARK, marked_pids
from benchmarks.measure import Row, main, render_values
from benchmarks.quiet_view import QuietView
from benchmarks.session_peers import ALL_REDUCE, PEERS
from ddpilot import Session
from ddpilot.launching.rank_server.client import stop_servers

NUM_RANKS = 2
WARM_LIMIT_S = 1.0
COLD_LIMIT_S = 3.0
FACTOR = 5.0
MANY_RANKS = 16
MANY_LIMIT_S = 8.0
MANY_LIMIT_MB = 1500.0


def ours() -> float:
    """Seconds from the call to the end of the first all_reduce; the end of the session is not measured."""
    assert torch.__version__  # it is loaded
    start = time.perf_counter()
    with Session(NUM_RANKS, view=QuietView()) as session:
        session.execute(ALL_REDUCE.format(num_ranks=NUM_RANKS))
        return time.perf_counter() - start


def peer(name: str) -> float:
    """The same of a peer."""
    start = time.perf_counter()
    with PEERS[name]() as execute:
        execute(ALL_REDUCE.format(num_ranks=NUM_RANKS))
        return time.perf_counter() - start


def in_fresh_process(which: str) -> float:
    """Seconds of the first start of a fresh process; not a number, and said why, where that fails."""
    argv = [sys.executable, "-m", "benchmarks.session_start", "--one", which]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        print(f"{which}: {done.stderr}", file=sys.stderr)
        return float("nan")
    return float(done.stdout.split()[-1])


def start_many() -> tuple[float, float, float]:
    """Seconds to the start of 16 ranks and to their first all_reduce, and MB (PSS) of everything it took by then."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    stop_servers()
    start = time.perf_counter()
    with Session(MANY_RANKS, view=QuietView(), env={"OMP_NUM_THREADS": "1"}) as session:
        started_s = time.perf_counter() - start
        session.execute(ALL_REDUCE.format(num_ranks=MANY_RANKS))
        reduced_s = time.perf_counter() - start
        used_mb = sum(pss_mb(pid) for pid in marked_pids(mark) - {os.getpid()})
    stop_servers()
    return started_s, reduced_s, used_mb


def measure(rounds: int) -> list[Row]:
    """All bars; one unmeasured session warms the rank server up."""
    many = start_many()
    ours()
    ways: dict[str, Callable[[], float]] = {"warm": ours, "cold": lambda: in_fresh_process("ddpilot")}
    ways |= {name: partial(in_fresh_process, name) for name in PEERS}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(way())
    peers = {name: taken[name] for name in PEERS}
    missing = [name for name, values in peers.items() if any(value != value for value in values)]
    medians = {name: statistics.median(values) for name, values in peers.items() if name not in missing}
    fastest_s = min(medians.values(), default=float("nan"))
    said = "; ".join(
        f"{name}: did not run" if name in missing else f"{name} {render_values(values)}"
        for name, values in peers.items()
    )
    warm_s, cold_s = statistics.median(taken["warm"]), statistics.median(taken["cold"])
    return [
        Row(
            what="warm session, 2 ranks, one all_reduce",
            ours=render_values(taken["warm"]),
            peer=said,
            ratio=f"1/{fastest_s / warm_s:.1f} of the faster",
            bar="at most 1.0 s and 1/5",
            holds=not missing and warm_s <= WARM_LIMIT_S and fastest_s / warm_s >= FACTOR,
        ),
        Row(
            what="cold session, 2 ranks, one all_reduce",
            ours=render_values(taken["cold"]),
            peer=said,
            ratio=f"1/{fastest_s / cold_s:.1f} of the faster",
            bar="at most 3 s",
            holds=not missing and cold_s <= COLD_LIMIT_S,
        ),
        Row(
            what=f"cold session of {MANY_RANKS} ranks",
            ours=f"started in {many[0]:.1f} s, all_reduce after {many[1]:.1f} s, {many[2]:.0f} MB in all (PSS)",
            peer="",
            ratio="",
            bar="at most 8 s and 1,500 MB",
            holds=many[0] <= MANY_LIMIT_S and many[2] <= MANY_LIMIT_MB,
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(ours() if sys.argv[2] == "ddpilot" else peer(sys.argv[2]))
    else:
        sys.exit(main(measure, rounds=5))
