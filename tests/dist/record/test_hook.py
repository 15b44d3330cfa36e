# SPDX-License-Identifier: Apache-2.0
"""The hook with which launcher and session start a recording in each rank."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpilot.launching.launch import run_local
from ddpilot.launching.options import LaunchOptions
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.flight_ring.reader import count_begun_in, find_waiting, read_newest, read_ring
from ddpilot.record.hook import RING_DIR_VARIABLE, find_rings, ring_path
from ddpilot.watch.companion import Watcher
from ddpilot.watch.options import WatchOptions

PATIENCE_S = 60.0


def run_with_hook(folder: Path, function: object) -> list[object]:
    """What 2 ranks returned that were started with the hook and told to record into `folder`."""
    options = LaunchOptions(nproc_per_node=2, timeout_s=100)
    return list(run_local(options, function, (), {}, lambda name, count: Hooked(folder)))  # type: ignore[arg-type]


class Hooked(Watcher):
    """Starts the hook in each rank, and looks at nothing."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(WatchOptions(guard=False), "hooked", 2)
        self.variables = {} if folder is None else {RING_DIR_VARIABLE: str(folder)}

    def begin(self, ranks: object, sources: object = None, *, is_paused: bool = False) -> None:
        """Nothing is observed."""


def look_at_each_other() -> RankLog | None:
    """Rank 0 waits for rank 1 in a subgroup; rank 1 says what it sees of rank 0, and how long a look takes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = os.environ[RING_DIR_VARIABLE]
    pair = dist.new_group([0, 1], group_desc="both")
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    seen = None
    if rank == 1:
        seen = wait_for_rank_0(ring_path(folder, 0))
    dist.reduce(torch.ones(6), 1, group=pair)
    dist.destroy_process_group()
    return seen


def wait_for_rank_0(path: Path) -> RankLog:
    """What rank 0 is in, as soon as that is a reduce."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        log = read_newest(path)
        waiting = find_waiting(log)
        if waiting and waiting.op == "reduce" and [entry.state for entry in log.collectives[:-1]] == ["done"] * 3:
            return log
        time.sleep(0.01)
    raise AssertionError(f"not within {PATIENCE_S} s: {log}")


def test_hook_records_each_rank_and_shows_what_it_is_in(tmp_path: Path) -> None:
    """Each rank has its ring, for this user only; another process sees what a rank waits in, since when, and counts."""
    seen = run_with_hook(tmp_path, look_at_each_other)[1]
    assert isinstance(seen, RankLog)
    assert list(find_rings(tmp_path)) == [0, 1]
    assert find_rings(tmp_path)[1] == ring_path(tmp_path, 1)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    waiting = find_waiting(seen)
    assert waiting is not None
    assert waiting.line is not None
    assert (waiting.op, waiting.seq, waiting.num_bytes, waiting.root) == ("reduce", 0, 24, 1)
    assert waiting.line.place.startswith(f"{__file__}:")
    assert waiting.line.text == "dist.reduce(torch.ones(6), 1, group=pair)"
    assert 0 < waiting.start_ns < time.monotonic_ns()
    assert waiting.group is not None
    assert waiting.group.description == "both"
    assert (count_begun_in(seen, waiting.group.name), count_begun_in(seen, "0")) == (1, 3)
    assert seen.closed_ns is None
    after = read_newest(ring_path(tmp_path, 0))
    assert (find_waiting(after), after.rank) == (None, 0)
    assert after.closed_ns is not None


def add_up() -> float:
    """An all_reduce, recorded or not."""
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def test_hook_does_nothing_when_no_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks without the variable run as ever."""
    monkeypatch.delenv(RING_DIR_VARIABLE, raising=False)
    options = LaunchOptions(nproc_per_node=1, timeout_s=100)
    assert list(run_local(options, add_up, (), {}, lambda name, count: Hooked(None))) == [1.0]


@pytest.mark.parametrize("kind", ["missing", "a file", "no ring"])
def test_hook_says_one_line_and_goes_on_when_it_cannot_record(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder that is not there, is none, or holds something else under the ring's name: one line per rank."""
    folder = tmp_path / "rings"
    if kind == "a file":
        folder.write_text("")
    elif kind == "no ring":
        folder.mkdir()
        for rank in range(2):
            ring_path(folder, rank).write_text("something else")
    assert run_with_hook(folder, add_up) == [2.0, 2.0]
    lines = [line for line in capfd.readouterr().err.splitlines() if "collectives are not recorded" in line]
    assert len(lines) == 2
    assert sorted(line.partition(": ")[2][:6] for line in lines) == ["rank 0", "rank 1"]


def test_hook_starts_no_recording_in_processes_that_a_rank_starts(tmp_path: Path) -> None:
    """Only what the launcher starts calls the hook: the variable alone does nothing."""
    assert run_with_hook(tmp_path, run_a_script) == ["False\n", "False\n"]
    assert {read_ring(path).num_begun for path in find_rings(tmp_path).values()} == {0}


def run_a_script() -> str:
    """Whether a Python process that a rank starts has the recording loaded."""
    import subprocess
    import sys

    script = "import sys, ddpilot.errors; print('ddpilot.record.collectives.start_stop' in sys.modules)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
