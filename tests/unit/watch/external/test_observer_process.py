# SPDX-License-Identifier: Apache-2.0
"""The observer of ranks that ddpilot has not started, where these are gone or their files are damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpilot.record.hook import ring_path
from ddpilot.watch.external.observer_process import ObserverProcess
from ddpilot.watch.external.rank_process import RankProcess


@pytest.fixture
def ended() -> RankProcess:
    """A rank, the only one of its job, that has ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        pid, started_s = process.pid, psutil.Process(process.pid).create_time()
        process.communicate(b"\n")
    job = {"world_size": 1, "local_world_size": 1, "local_rank": 0}
    return RankProcess(
        pid=pid, started_s=started_s, shell_pid=pid, shell_started_s=started_s, since_ns=1, number=0, job=job
    )


def test_a_rank_that_ended_before_its_observer_began_is_no_error(
    tmp_path: Path, ended: RankProcess, capsys: Any
) -> None:
    """Nothing is left to watch, and nothing is printed."""
    folder = tmp_path / "jobs" / "0101-000000-abcd"
    folder.mkdir(parents=True)
    ended.write(folder, 0)
    ObserverProcess(folder).run()
    assert capsys.readouterr().err == ""
    assert not folder.exists()


def test_a_damaged_ring_of_a_rank_that_has_ended_ends_the_watching_without_an_error(
    tmp_path: Path, ended: RankProcess
) -> None:
    """It was not closed, as far as can be read."""
    ring_path(tmp_path, 0).write_bytes(b"\0" * 5000)
    observing = ObserverProcess(tmp_path)
    observing._ranks = {0: ended}
    (facts,) = observing._facts().values()
    assert (facts.process.state, facts.returned) == ("ended", False)
