# SPDX-License-Identifier: Apache-2.0
"""Memory that a waiting rank costs (PSS: shared pages are split among those who share them), against spawn.

Ours is what all processes of the launch cost together beyond the rank server alone, divided by the number of ranks.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn as torch_spawn

import ddpilot
from benchmarks.leftovers import MARK, marked_pids
from benchmarks.measure import Row, alternate, main, render_values
from ddpilot.launching.rank_server.client import server_pids, stop_servers

NUM_RANKS = 4
LIMIT_MB = 40.0
WAIT_LIMIT_S = 60.0


def pss_mb(pid: int) -> float:
    """Proportional set size of one process in MB (10^6 bytes)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"no Pss in /proc/{pid}/smaps_rollup")


def wait_for_files(folder: Path, pattern: str, count: int) -> None:
    """Return when `count` files of that name are there. Raises TimeoutError after a minute."""
    end = time.monotonic() + WAIT_LIMIT_S
    while len(list(folder.glob(pattern))) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"waited {WAIT_LIMIT_S} s for {count} files {pattern}, found {os.listdir(folder)}")
        time.sleep(0.05)


def wait_and_weigh(rank: int | None, folder: Path, mark: str, spared: int) -> None:
    """Wait until every rank waits; then rank 0 weighs every process of this run except the parent, and tells."""
    assert dist.is_available()  # torch is loaded
    rank = int(os.environ["RANK"]) if rank is None else rank
    (folder / f"ready{rank}").touch()
    wait_for_files(folder, "ready*", NUM_RANKS)
    if rank == 0:
        total = sum(pss_mb(pid) for pid in marked_pids(mark) - {spared})
        (folder / "total.writing").write_text(str(total))
        (folder / "total.writing").rename(folder / "total")
    wait_for_files(folder, "total", 1)


def launch_mb(mark: str) -> float:
    """MB per rank of ours beyond the warm rank server."""
    server_mb = sum(pss_mb(pid) for pid in server_pids())
    with tempfile.TemporaryDirectory() as folder:
        ddpilot.launch(wait_and_weigh, None, Path(folder), mark, os.getpid(), nproc_per_node=NUM_RANKS)
        return (float(Path(folder, "total").read_text()) - server_mb) / NUM_RANKS


def spawn_mb(mark: str) -> float:
    """MB per rank of spawn; the rank server of ours is stopped meanwhile, so that it shares no page with them."""
    stop_servers()
    with tempfile.TemporaryDirectory() as folder:
        torch_spawn(wait_and_weigh, (Path(folder), mark, os.getpid()), NUM_RANKS)  # type: ignore[no-untyped-call]
        total = float(Path(folder, "total").read_text())
    ddpilot.launch(os.getpid, nproc_per_node=NUM_RANKS)  # the server imports more before it forks several
    return total / NUM_RANKS


def measure(rounds: int) -> list[Row]:
    """The bar; the mark is carried by this process's descendants alone."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    ddpilot.launch(os.getpid, nproc_per_node=NUM_RANKS)  # the server imports more before it forks several
    ours, spawned = alternate(lambda: launch_mb(mark), lambda: spawn_mb(mark), rounds)
    median_mb = statistics.median(ours)
    return [
        Row(
            what=f"memory of an idle rank (PSS), {NUM_RANKS} ranks",
            ours=render_values(ours, "MB"),
            peer=f"spawn {render_values(spawned, 'MB')}",
            ratio=f"1/{statistics.median(spawned) / median_mb:.1f}",
            bar="at most 40 MB beyond the server",
            holds=median_mb <= LIMIT_MB,
        )
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=3))
