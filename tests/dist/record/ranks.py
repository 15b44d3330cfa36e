# SPDX-License-Identifier: Apache-2.0
"""Run a function on real ranks that record, and read their rings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ddpilot
from ddpilot.record.collectives.start_stop import Recording, start_recording
from ddpilot.record.flight_ring.log import Collective, RankLog
from ddpilot.record.flight_ring.reader import read_ring

PATIENCE_S = 60.0


def run(num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """What every rank returned; the test fails with every rank's last lines after 100 seconds."""
    return ddpilot.Launcher(nproc_per_node=num_ranks, timeout_s=100, watch=False).run(function, *args)


def my_rank() -> int:
    """The rank that runs this."""
    return int(os.environ["RANK"])


def ring_of(folder: Path, rank: int) -> Path:
    """Where `rank` records."""
    return folder / f"rank{rank}.ring"


@contextmanager
def recorded(folder: Path, **options: Any) -> Iterator[Recording]:
    """In a rank: a gloo group that is recorded while the block runs."""
    dist.init_process_group("gloo")
    with start_recording(ring_of(folder, my_rank()), rank=my_rank(), **options) as recording:
        yield recording
    dist.destroy_process_group()


def read_all(folder: Path, num_ranks: int) -> list[RankLog]:
    """Every rank's ring, after the ranks are gone."""
    return [read_ring(ring_of(folder, rank)) for rank in range(num_ranks)]


def wait_for(folder: Path, rank: int, holds: Callable[[RankLog], bool]) -> RankLog:
    """The ring of `rank` as soon as something holds of it; an error when it never does."""
    deadline = time.monotonic() + PATIENCE_S
    log = None
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):  # it appears when it can be read
            log = read_ring(ring_of(folder, rank))
        if log is not None and holds(log):
            return log
        time.sleep(0.01)
    raise AssertionError(f"not in {PATIENCE_S} s: {log and log.collectives[-1:]}, {log and log.first_fault}")


def matchable(log: RankLog) -> list[tuple[Any, ...]]:
    """What has to be the same on every rank of a correct program."""
    return [what(collective) for collective in log.collectives if not collective.is_p2p]


def what(collective: Collective) -> tuple[Any, ...]:
    """A collective's group, number, operation, and the shapes that it takes."""
    assert collective.group is not None
    group = (collective.group.name, collective.group.incarnation)
    return (group, collective.seq, collective.op, collective.inputs, collective.reduce_op, collective.root)
