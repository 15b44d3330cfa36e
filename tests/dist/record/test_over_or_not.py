# SPDX-License-Identifier: Apache-2.0
"""Whether a collective has finished, read from outside while the rank waits or holds the GIL."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.flight_ring.reader import read_ring
from tests.dist.record.ranks import my_rank, read_all, recorded, ring_of, run, wait_for


def is_stuck(log: RankLog) -> bool:
    """It has been seen waiting in its last collective, and its Python still ran after that collective had begun."""
    last = log.collectives[-1] if log.collectives else None
    return bool(last and last.op == "all_reduce" and last.pending_ns and (log.heartbeat_ns or 0) > last.start_ns)


def one_rank_is_late(folder: Path) -> tuple[RankLog, RankLog] | None:
    """Rank 0 waits in an all_reduce; rank 1 looks at it from outside, joins, and looks again."""
    with recorded(folder):
        if my_rank() == 0:
            dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
            wait_for(folder, 0, lambda log: log.collectives[-1].end_ns is not None)
            return None
        stuck = wait_for(folder, 0, is_stuck)
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
        return stuck, wait_for(folder, 0, lambda log: log.collectives[-1].end_ns is not None)


def test_collective_is_seen_to_wait_and_then_to_be_over(tmp_path: Path) -> None:
    """The record is there before the others come, says what it waits in, and then when it was over."""
    stuck, over = run(2, one_rank_is_late, tmp_path)[1]
    waiting, done = stuck.collectives[-1], over.collectives[-1]
    assert (waiting.end_ns, waiting.is_async, waiting.reduce_op) == (None, False, "MAX")
    assert waiting.start_ns < waiting.pending_ns <= time.monotonic_ns()
    assert done.index == waiting.index
    assert done.end_ns > waiting.pending_ns
    assert done.state == "done"
    assert stuck.closed_ns is None
    closed = read_ring(ring_of(tmp_path, 0)).closed_ns
    assert closed is not None
    assert closed > done.end_ns


def fail_in_every_way(folder: Path) -> int:
    """A barrier that runs into its time limit and a call that torch refuses; how often Python ran during the first."""
    num_beats = 0
    done = threading.Event()

    def count() -> None:
        nonlocal num_beats
        while not done.wait(0.02):
            num_beats += 1

    with recorded(folder):
        if my_rank() == 0:
            counter = threading.Thread(target=count)
            counter.start()
            with pytest.raises(RuntimeError, match="monitoredBarrier"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.3))
            done.set()
            counter.join()
            group: Any = dist.group.WORLD
            with pytest.raises((RuntimeError, ValueError)):
                group.broadcast(torch.ones(1), 17)
        else:  # a rank that leaves ends the other one's wait early
            wait_for(folder, 0, lambda log: log.num_begun == 2)
    return num_beats


def test_collective_that_raises_is_recorded_as_failed(tmp_path: Path) -> None:
    """What never got started, or blocked until its limit, is over and failed; the rank's Python ran all the time."""
    assert run(2, fail_in_every_way, tmp_path)[0] > 3
    log, _ = read_all(tmp_path, 2)
    barrier, refused = log.collectives[:2]
    assert (barrier.op, barrier.state) == ("monitored_barrier", "failed")
    assert (refused.op, refused.state) == ("broadcast", "failed")
    assert barrier.end_ns is not None
    assert barrier.end_ns - barrier.start_ns > 0.2e9
