# SPDX-License-Identifier: Apache-2.0
"""The checkpoint folder: passes in a usual folder, fails on a full disk and where renames are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpilot.diagnose.checks import filesystem
from tests.unit.diagnose.checking import check_in_child, make_facts, statuses, text_of


def mounted(size: str, then: str = "true") -> tuple[str, ...]:
    """A command that mounts a tmpfs of `size` on its argument, in a mount namespace of its own."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("this user may not make mount namespaces")
    script = f'folder=$1; shift; mount -t tmpfs -o size={size} tmpfs "$folder" && {then} && exec "$@"'
    return ("unshare", "-m", "sh", "-c", script, "sh")


@contextmanager
def append_only(folder: Path) -> Iterator[None]:
    """A folder in which files can be created, but neither renamed nor removed."""
    done = subprocess.run(["chattr", "+a", str(folder)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("this file system has no append-only folders")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-a", str(folder)], check=True)


def test_a_usual_folder_has_space_and_takes_writes_and_renames(tmp_path: Path) -> None:
    """Also a folder that does not exist yet; nothing is left in it."""
    facts = make_facts(checkpoint_dir=tmp_path / "not" / "yet")
    for check in (filesystem.checkpoint_space, filesystem.checkpoint_write, filesystem.atomic_rename):
        assert statuses(check, facts) == ["ok"], text_of(check, facts)
    assert os.listdir(tmp_path) == []
    assert str(tmp_path) in text_of(filesystem.checkpoint_space, facts)


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """A tmpfs of 1 MB, filled: no space, and the write of 8 MB fails."""
    fill = 'head -c 1048576 /dev/zero > "$folder/data"'
    around = (*mounted("1m", fill), str(tmp_path))
    (space,) = check_in_child("checkpoint_space", around=around, folder=tmp_path)
    (write,) = check_in_child("checkpoint_write", around=around, folder=tmp_path)
    assert [space[:2], write[:2]] == [["error", "DDP806"], ["error", "DDP806"]]
    assert f"{tmp_path} (tmpfs) has 0 B free of 1.0 MB" in space[2]
    assert "No space left on device" in write[2]


def test_little_space_is_a_warning(tmp_path: Path) -> None:
    """100 MB free."""
    (found,) = check_in_child("checkpoint_space", around=(*mounted("100m"), str(tmp_path)), folder=tmp_path)
    assert found[:2] == ["warning", "DDP806"]


def test_a_folder_that_refuses_renames_is_an_error(tmp_path: Path) -> None:
    """Files can be created in it, and keep their names for ever."""
    inner = tmp_path / "checkpoints"
    inner.mkdir()
    made = inner / "scratch"
    made.mkdir()
    with pytest.MonkeyPatch.context() as patch, append_only(made):
        patch.setattr(filesystem.tempfile, "mkdtemp", lambda **_: str(made))
        found = text_of(filesystem.atomic_rename, make_facts(checkpoint_dir=inner))
    assert f"renaming a file onto another one in {inner}: Operation not permitted" in found
