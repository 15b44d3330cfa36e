# SPDX-License-Identifier: Apache-2.0
"""Real faults: processes killed in the middle of a save, a full file system, a directory that cannot be written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.errors import CheckpointError

ROOT = Path(__file__).parents[4]
FULL_DISK = ROOT / "tests" / "dist" / "training" / "checkpoint" / "full_disk.py"
NOBODY = 65534


def run_killed_saves(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What each saver left, as the script in `killed_saves.py` prints it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.dist.training.checkpoint.killed_saves", str(folder), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_nothing_was_lost(left: dict[str, Any]) -> None:
    """What is found is whole, as new as what was reported as being on the disk, and nothing had to be passed over."""
    assert left["whole"], left
    assert left["told"] == [], left
    assert left["step"] >= max(left["before"], left["reported"]), left
    assert left["step"] <= max(left["before"], left["reported"]) + 1, left


def test_save_leaves_a_whole_latest_when_killed_before_any_disk_call(tmp_path: Path) -> None:
    """SIGKILL before each fsync, rename, replace, mkdir and unlink of two saves, one after the other, in one folder."""
    savers = run_killed_saves(tmp_path, "before")
    assert [saver["ended_by"] for saver in savers] == [9] * (len(savers) - 1) + [0]
    assert len(savers) > 20
    for left in savers:
        check_nothing_was_lost(left)
    finished = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("save-"))
    assert finished == [".writer", "best", "latest"], "the last saver cleared away what the killed ones had left"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20 if os.environ.get("DDPILOT_SOAK") else 1))
def test_save_leaves_a_whole_latest_when_killed_at_random_times(tmp_path: Path, seed: int) -> None:
    """SIGKILL after a random time, again and again in one folder; seeded."""
    killed = run_killed_saves(tmp_path, "after", "40", str(seed))
    assert [left["ended_by"] for left in killed] == [9] * 40
    for left in killed:
        check_nothing_was_lost(left)
    assert killed[-1]["step"] > 1


def test_save_goes_on_when_the_file_system_is_full(tmp_path: Path) -> None:
    """On a file system of 2 MB: what fits is kept, what does not is told each time, and there is no half of it."""
    command = f"mount -t tmpfs -o size=2m tmpfs '{tmp_path}' && exec '{sys.executable}' '{FULL_DISK}' '{tmp_path}'"
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system; a full one is stood in for by a limit on files elsewhere")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout)
    assert left["good"] == [True, False, False, True]
    assert left["steps"] == [1, 4]
    assert left["latest"] == 4
    assert left["entries"] == [".writer", "latest", "save-000001-step-1", "save-000002-step-4"]
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert "[Errno 28] No space left on device: 'model.safetensors'. Training continues" in line
        assert "the last good checkpoint is save-000001-step-1. " in line


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A directory that this process may enter and not write in, also where the tests run as root."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))  # the tests' own folder lets nobody through
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_check_writable_refuses_a_read_only_directory(unwritable: Path) -> None:
    """Before training starts, for the directory itself and for one to be made in it; reading is not refused."""
    for folder in (unwritable, unwritable / "new"):
        directory = CheckpointDir(folder)
        with pytest.raises(CheckpointError, match=f"writing in {folder}: Permission denied") as caught:
            directory.check_writable()
        assert "Training has not started. Choose a `checkpoint_dir`" in str(caught.value)
        assert isinstance(caught.value.__cause__, PermissionError)
        assert directory.latest() is None
