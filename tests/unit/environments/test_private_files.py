# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are opened because of their name: this user's own, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from ddpilot.environments.private_files import (
    check_own_folder,
    is_own_process,
    make_own_folder,
    make_socket_folder,
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
    """The target of a link may change at any moment."""
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


@pytest.fixture
def tempdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty temporary directory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def leave_scratch_folder(tempdir: Path) -> Path:
    """Leave a scratch folder in `tempdir` as a process does that is killed in it."""
    with scratch_folder("run-") as folder:
        folder.rename(tempdir / "hidden")
    return (tempdir / "hidden").rename(folder)


def test_scratch_folder_removes_what_a_killed_process_has_left(tempdir: Path) -> None:
    """Not a folder that a running process uses."""
    left = leave_scratch_folder(tempdir)
    with scratch_folder("run-") as used:
        assert not left.exists()
        with scratch_folder("run-") as other:
            assert used.exists()
            assert other != used
    assert os.listdir(tempdir) == []


def test_scratch_folder_keeps_folders_of_the_user_that_have_its_prefix(tempdir: Path) -> None:
    """Whatever their age, with a name as of its own too, and also where one of its own was copied or renamed."""
    left = leave_scratch_folder(tempdir)
    shutil.copytree(left, tempdir / "run-abcd1234")
    left.rename(tempdir / "run-2024-results")
    (tempdir / "run-checkpts").mkdir(mode=0o700)
    for folder in tempdir.iterdir():
        os.utime(folder, (1, 1))
    with scratch_folder("run-"):
        pass
    assert sorted(os.listdir(tempdir)) == ["run-2024-results", "run-abcd1234", "run-checkpts"]


def test_scratch_folder_removes_nothing_where_locks_do_not_exist(
    tempdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder there may be in use."""
    left = leave_scratch_folder(tempdir)
    os.utime(left, (1, 1))

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    with scratch_folder("run-"):
        pass
    assert os.listdir(tempdir) == [left.name]


def test_scratch_folder_removes_what_is_left_next_to_a_folder_that_vanishes(
    tempdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where two runs start at once."""
    left = leave_scratch_folder(tempdir)
    monkeypatch.setattr("os.listdir", lambda _: ["run-vanished", left.name])
    with scratch_folder("run-"):
        assert not left.exists()


def test_is_own_process_is_false_for_one_that_is_gone() -> None:
    """It would not get a signal."""
    assert is_own_process(os.getpid())
    assert not is_own_process(2**30)


def test_make_folder_is_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the temporary directory, or elsewhere where that one is too deep."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    for parent, is_used in ((Path(tempfile.gettempdir()), True), (deep, False)):
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        folder = make_socket_folder()
        try:
            assert folder.stat().st_mode & 0o777 == 0o700
            assert len(str(folder / "r1023.99.parcels")) <= 107
            assert (folder.parent == parent) is is_used
            (folder / "socket").touch()
        finally:
            shutil.rmtree(folder)
