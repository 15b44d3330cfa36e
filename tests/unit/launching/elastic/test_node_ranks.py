# SPDX-License-Identifier: Apache-2.0
"""Ends of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddpilot.launching.elastic import node_ranks
from ddpilot.launching.elastic.node_ranks import NodeRank, NodeRanks
from ddpilot.launching.elastic.rank_main import REPORT_KEY

REPORT = {
    "time_s": 5.0,
    "type_name": "ValueError",
    "message": "bad",
    "traceback": "",
    "is_victim": False,
    "interrupted": False,
    "exitcode": 1,
}
Start = Callable[..., NodeRank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a rank that runs a shell's line, in a session of its own as torch's agent does."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(rank: int, line: str) -> NodeRank:
        processes.append(subprocess.Popen(["sh", "-c", line], start_new_session=True))
        return NodeRank(rank=rank, process=processes[-1], report=tmp_path / f"{rank}.json")

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def running_in(group: int) -> list[int]:
    """Pids of a process group, without zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_local_ranks_end_what_is_left_of_every_group(start: Start) -> None:
    """Also what a rank started that has ended by itself."""
    one, other = start(0, "sleep 60 & exit 3"), start(1, "sleep 60")
    ranks = NodeRanks([one, other], print)
    while 0 in ranks.live:
        ranks.poll()
    left = [psutil.Process(pid) for pid in running_in(one.process.pid)]
    assert left
    ranks.end(signal.SIGTERM, 0.2)
    assert not ranks.live
    assert ranks.describe_ends().endswith("rank 1 was killed by SIGTERM")
    psutil.wait_procs(left, timeout=10)
    assert not running_in(one.process.pid)


def test_local_ranks_call_back_once_while_ranks_take_their_time_to_end(start: Start, tmp_path: Path) -> None:
    """Not where they end at once."""
    called: list[str] = []
    NodeRanks([start(0, "exit 3")], print).end(signal.SIGTERM, 5.0, lambda: called.append("quick"))
    os.mkfifo(tmp_path / "up")
    stubborn = start(1, f"trap '' TERM; echo > '{tmp_path}/up'; while :; do sleep 0.01; done")
    (tmp_path / "up").read_bytes()  # waits until it is written
    NodeRanks([stubborn], print).end(signal.SIGTERM, 0.5, lambda: called.append("slow"))
    assert called == ["slow"]


def test_local_ranks_kill_what_ignores_the_signal(start: Start) -> None:
    """After the grace."""
    stubborn = start(0, "trap '' TERM; echo up; while :; do sleep 0.01; done")
    ranks = NodeRanks([stubborn], print)
    assert ranks.silent_pids() == [stubborn.process.pid]
    ranks.end(signal.SIGTERM, 0.05)
    assert stubborn.describe_end() in ("was killed by SIGKILL", "was killed by SIGTERM")
    assert ranks.live == ()


def test_local_ranks_tell_failures_from_good_ends(start: Start) -> None:
    """Code 0 is not a failure, other codes are, and a report counts before the process has exited."""
    ranks = [start(0, "exit 0"), start(1, "exit 4"), start(2, "sleep 60")]
    ranks[2].report.write_text(json.dumps({REPORT_KEY: REPORT}))
    local = NodeRanks(ranks, print)
    while local.live != (2,):
        local.poll()
    found = {failure.rank: failure for failure in local.failures()}
    assert set(found) == {1, 2}
    assert found[1].exited is not None
    assert found[1].exited.exitcode == 4
    assert found[2].time_s == 5.0
    assert local.succeeded == (0,)
    assert local.silent_pids() == []
    local.kill()


def test_local_ranks_let_a_rank_that_raised_end_by_itself_for_a_while(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit handlers may save something; a thread that never ends is not waited for."""
    said: list[str] = []
    rank = start(0, "sleep 60")
    rank.report.write_text(json.dumps({REPORT_KEY: REPORT}))
    local = NodeRanks([rank], said.append)
    local.poll()
    assert local.is_leaving(rank)
    monkeypatch.setattr(node_ranks, "STUCK_EXIT_S", -1.0)
    assert not local.is_leaving(rank)
    assert said[0].startswith("rank 0 raised ValueError and has not exited after ")
    local.kill()


def test_local_ranks_may_follow_one_that_left_for_a_requeue(start: Start) -> None:
    """For the given time, unless a rank has exited or raised in a different way."""
    gone, busy = start(0, "exit 75"), start(1, "sleep 60")
    ranks = NodeRanks([gone, busy], print)
    while gone.is_live:
        ranks.poll()
    now_s = time.monotonic()
    assert ranks.are_leaving(now_s, 60.0)
    assert not ranks.are_leaving(now_s - 61.0, 60.0)
    busy.report.write_text(json.dumps({REPORT_KEY: REPORT}))
    ranks.poll()
    assert not ranks.are_leaving(now_s, 60.0)
    ranks.kill()


def test_local_rank_ignores_a_report_that_is_not_ours(start: Start, tmp_path: Path) -> None:
    """torch's own `record` writes such a file too; half a file is none."""
    rank = start(0, "exit 1")
    for text in ('{"message": "x"}', '{"mess', ""):
        rank.report.write_text(text)
        rank.poll()
        assert rank.raised is None
    rank.report.write_text(json.dumps({REPORT_KEY: REPORT}))
    rank.poll()
    assert rank.raised is not None
