# SPDX-License-Identifier: Apache-2.0
"""`Session.status`: the state of every rank, also during a cell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from ddpilot import LaunchInterrupted, RankError, Session
from ddpilot.session.status import RankStatus
from tests.dist.launching.scripts import wait_until
from tests.dist.session.conftest import Kept

Start = Callable[..., Session]


def test_status_of_idle_ranks(start: Start) -> None:
    """Pid and memory are those of the rank's process."""
    session = start(2)
    session.execute("group.barrier()")
    statuses = session.status()
    assert [status.state for status in statuses] == ["idle", "idle"]
    assert [status.pid for status in statuses] == session.pull("__import__('os').getpid()")
    assert all(status.memory_bytes and status.memory_bytes > 1_000_000 for status in statuses)
    assert all(status.cpu_percent is not None and status.gpu_percent is None for status in statuses)
    assert all(0 <= time.monotonic() - status.since_s < 60 for status in statuses)


def test_status_shows_which_ranks_wait_in_which_collective(start: Start) -> None:
    """Rank 1 computes, rank 0 waits for it in a barrier of the cell's line 3, rank 2 is done."""
    session = start(3)
    session.execute("group.barrier()")
    seen: list[tuple[RankStatus, ...]] = []

    def look() -> None:
        def waits() -> bool:
            seen.append(session.status())
            return seen[-1][0].collective is not None and seen[-1][2].state == "idle"

        wait_until(waits, limit_s=20)
        session.interrupt()

    looker = threading.Thread(target=look)
    looker.start()
    with pytest.raises(LaunchInterrupted):
        session.execute("while rank == 1: pass\nif rank == 0:\n    group.barrier()", cell=5)
    looker.join()
    waiting, computing, done = seen[-1]
    assert waiting.collective is not None
    assert (waiting.state, waiting.cell) == ("busy", 5)
    assert (waiting.collective.op, waiting.collective.site) == ("barrier", "Cell In[5]:3")
    assert waiting.collective.group == ""
    assert (computing.state, computing.collective) == ("busy", None)
    assert (done.state, done.cell) == ("idle", None)


def test_status_of_a_dead_rank_says_why(start: Start) -> None:
    """The others are unaffected."""
    session = start(2)
    with pytest.raises(RankError):
        session.execute("import os\nif rank == 1: os.kill(os.getpid(), 9)")
    alive, dead = session.status()
    assert alive.state == "idle"
    assert (dead.state, dead.pid, dead.memory_bytes) == ("dead", None, None)
    assert "SIGKILL" in dead.reason


def test_stacks_take_nothing_of_what_a_rank_writes(start: Start, view: Kept) -> None:
    """Lines that C++ code writes into stderr meanwhile belong to the cell's output."""
    session = start(1)
    found: list[str] = []
    reader = threading.Timer(0.5, lambda: found.append(session.stacks()[0]))
    reader.start()
    session.execute(
        "import os, time\nfor number in range(300):\n    os.write(2, b'line %d\\n' % number)\n    time.sleep(0.005)"
    )
    reader.join()
    assert view.raws[0].decode().splitlines() == [f"line {number}" for number in range(300)]
    assert 'File "Cell In[1]"' in found[0]
