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
from ddpilot.watch.observing import Observing


@pytest.fixture
def ended_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def said(folder: Path, pid: int) -> dict[str, Any]:
    """What `enable` passes on, of one rank."""
    about = {"folder": str(folder), "name": "train.py", "command": ["train.py"], "rank_pid": pid, "way": None}
    return {**about, "world_size": 1, "local_world_size": 1, "on_finding": "stop", "stall_warn_s": 60.0}


def test_a_rank_that_ended_before_its_observer_began_is_no_error(tmp_path: Path, ended_pid: int, capsys: Any) -> None:
    """Nothing is left to watch, and nothing is printed."""
    folder = tmp_path / "job"
    folder.mkdir()
    Observing(said(folder, ended_pid)).run()
    assert capsys.readouterr().err == ""
    assert not folder.exists()


def test_a_damaged_ring_of_a_rank_that_has_ended_ends_the_watching_without_an_error(
    tmp_path: Path, ended_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not closed, as far as can be read."""
    ring_path(tmp_path, 0).write_bytes(b"\0" * 5000)
    observing = Observing(said(tmp_path, ended_pid))
    process = psutil.Process()
    monkeypatch.setattr(process, "_pid", ended_pid)
    observing._pids[0] = process
    (facts,) = observing._facts().values()
    assert not facts.returned
