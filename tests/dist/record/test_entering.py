# SPDX-License-Identifier: Apache-2.0
"""The ring shows the group that a rank waits to create, and whether only ranks of this job can join."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.flight_ring.log import RankLog
from tests.dist.record.ranks import my_rank, ring_of, run, wait_for

ENOUGH_NS = 1_600_000_000


def has_waited(log: RankLog) -> bool:
    """It has been asking for long enough to know who can come."""
    return log.entering_ns is not None and (log.heartbeat_ns or 0) - log.entering_ns > ENOUGH_NS


def ask_for_two(folder: Path, has_child: bool) -> tuple[RankLog, RankLog]:
    """Ask for a group of two in a job of one, in vain: what the ring says meanwhile, and after that."""
    start_recording(ring_of(folder, my_rank()), rank=my_rank())
    seen: list[RankLog] = []
    look = threading.Thread(target=lambda: seen.append(wait_for(folder, 0, has_waited)))
    look.start()
    with contextlib.ExitStack() as stack:
        if has_child:
            child = stack.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
            stack.callback(child.kill)
        with pytest.raises(RuntimeError):
            dist.init_process_group("gloo", rank=0, world_size=2, timeout=timedelta(seconds=4))
    look.join()
    return seen[0], wait_for(folder, 0, lambda log: log.entering_ns is None)


@pytest.mark.parametrize("has_child", [False, True])
def test_a_rank_that_waits_for_its_group_says_what_it_asks_for(tmp_path: Path, has_child: bool) -> None:
    """A process that it has started might be the one that is missing."""
    meanwhile, afterwards = run(1, ask_for_two, tmp_path, has_child)[0]
    assert (meanwhile.asked_world_size, meanwhile.asked_rank, meanwhile.is_closed) == (2, 0, not has_child)
    assert afterwards.first_fault == ""
