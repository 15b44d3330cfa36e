# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are opened because of their name: this user's own, and nothing else."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from ddpilot.environments.own_files import (
    check_own_folder,
    is_own_process,
    make_own_folder,
    open_own_file,
    read_own_text,
    scratch_folder,
    write_own_text,
)


def test_open_own_file_follows_no_link_and_empties_nothing(tmp_path: Path) -> None:
    """Whatever the flags are."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("kept")
    link.symlink_to(target)
    with pytest.raises(OSError, match="link"):
        open_own_file(link, os.O_WRONLY | os.O_TRUNC)
    assert target.read_text() == "kept"


def test_open_own_file_takes_a_regular_file_alone(tmp_path: Path) -> None:
    """A named pipe would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_own_file(tmp_path / "pipe")


@pytest.mark.parametrize("mode", [0o602, 0o622])
def test_open_own_file_refuses_what_others_can_write_to(tmp_path: Path, mode: int) -> None:
    """It is not emptied either."""
    path = tmp_path / "file"
    path.write_text("kept")
    path.chmod(mode)
    with pytest.raises(PermissionError, match=r"other users can write to .*chmod go-w"):
        open_own_file(path, os.O_RDWR | os.O_TRUNC)
    assert path.read_text() == "kept"


def test_check_own_folder_refuses_a_link_and_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    """A link may lead to another folder at any moment."""
    folder = make_own_folder(tmp_path / "new" / "folder")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(NotADirectoryError, match="symbolic link"):
        check_own_folder(tmp_path / "link")
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="mode 0777"):
        make_own_folder(folder)


def test_write_own_text_is_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    """And takes the place of a draft that a killed process has left."""
    (tmp_path / "file.new").write_text("half")
    before = os.umask(0)
    try:
        write_own_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert read_own_text(tmp_path / "file") == "text"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_scratch_folder_removes_what_a_killed_process_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what another process uses, and not what is so new that it may not be locked yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hour_ago = time.time() - 3600
    left, new = tmp_path / "run-left", tmp_path / "run-new"
    for folder in (left, new):
        folder.mkdir(mode=0o700)
        (folder / "file").write_text("")
    os.utime(left, (hour_ago, hour_ago))
    with scratch_folder("run-") as used:
        assert not left.exists()
        os.utime(used, (hour_ago, hour_ago))
        with scratch_folder("run-") as other:
            assert used.exists()
            assert other != used
    assert os.listdir(tmp_path) == ["run-new"]


def test_is_own_process_is_false_for_one_that_is_gone() -> None:
    """It would not get a signal."""
    assert is_own_process(os.getpid())
    assert not is_own_process(2**30)
