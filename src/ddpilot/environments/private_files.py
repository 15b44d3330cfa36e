# SPDX-License-Identifier: Apache-2.0
"""Safely open files and folders of this user in directories that other users can write to.

Every file that ddpilot opens by name, and has not just created itself, is opened here. Symbolic links are not followed,
and owner and mode are checked on the opened file, so that it cannot be exchanged between check and use.
"""

from __future__ import annotations

import errno
import getpass
import os
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_WITHOUT_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_MAX_FOLDER_CHARS = 60
"""Longest parent folder to use: the path of a Unix socket is limited to 107 characters."""
_TOKEN = r"[a-z0-9_]{8}"
"""What `tempfile.mkdtemp` appends to a prefix."""
_MARKER = ".ddpilot-scratch"
"""File that marks a folder of `scratch_folder`; it names the folder and the machine."""


def own_temporary_folder() -> Path:
    """Folder for this user's files with predictable names in the temporary directory. It may not exist."""
    return Path(tempfile.gettempdir()) / f"ddpilot-{_user()}"


def make_own_folder(folder: Path) -> Path:
    """Create `folder` with mode 0700 if it does not exist, and return it after `check_own_folder`. Raises `OSError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return check_own_folder(folder)


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Context manager: a new folder of this user in the temporary directory, whose name starts with `prefix`.

    It is locked and then marked, so that if this process is killed, the next call with this prefix on this machine
    removes it. Folders without the mark are never removed, and none on a file system without locks.
    """
    _remove_left(Path(tempfile.gettempdir()), prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    fd = os.open(folder, os.O_RDONLY | _WITHOUT_LINKS)
    try:
        if _lock(fd, wait=False):
            with suppress(OSError):  # a full disk
                write_own_text(folder / _MARKER, _mark(folder))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _mark(folder: Path) -> str:
    return f"{folder.name} on {platform.node()}: a folder of ddpilot, removed once the process that made it has ended\n"


def _remove_left(parent: Path, prefix: str) -> None:
    """Remove the folders in `parent` that `scratch_folder(prefix)` has made in processes that were killed."""
    is_ours = re.compile(re.escape(prefix) + _TOKEN).fullmatch
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(parent)
    for folder in (parent / name for name in names if is_ours(name)):
        with suppress(OSError):  # it belongs to a different user, has no mark, or is gone
            if read_own_text(check_own_folder(folder) / _MARKER) == _mark(folder):
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | _WITHOUT_LINKS)
    try:
        if _lock(fd, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)


def check_own_folder(folder: Path) -> Path:
    """Return `folder` if it belongs to this user and others cannot write to it; raise `PermissionError` otherwise.

    Raises `NotADirectoryError` for a symbolic link or a file, and `FileNotFoundError` if it does not exist.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        raise NotADirectoryError(f"{folder} is {kind}, where a folder of this user is needed")
    _check_owner(folder, found)
    return folder


def open_own_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open the regular file `path` with `flags` and return its descriptor. O_TRUNC is applied after the checks.

    Raises `PermissionError` if the file belongs to a different user or if other users can write to it;
    `OSError` for a symbolic link, for anything but a regular file, and if it cannot be opened.
    """
    fd = os.open(path, (flags & ~os.O_TRUNC) | _WITHOUT_LINKS, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        _check_owner(path, found)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_own_fifo(path: str | os.PathLike[str]) -> int:
    """Open this user's pipe `path` for non-blocking writes and return its descriptor.

    Raises `OSError` if no process reads from it, or if it is not a pipe of this user.
    """
    fd = os.open(path, os.O_WRONLY | _WITHOUT_LINKS | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISFIFO(found.st_mode):
            raise OSError(f"{os.fspath(path)} is not a pipe")
        _check_owner(path, found)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_own_text(path: str | os.PathLike[str]) -> str:
    """Read the UTF-8 text file `path`. Raises `OSError` as `open_own_file` does."""
    with open(open_own_file(path), encoding="utf-8", errors="replace") as file:
        return file.read()


def write_own_text(path: Path, text: str) -> None:
    """Replace the file `path` with `text` atomically, with mode 0600. Raises `OSError`."""
    draft = path.with_name(f"{path.name}.new")
    with suppress(FileNotFoundError):
        draft.unlink()  # left by a process that was killed while writing
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _WITHOUT_LINKS, 0o600)
    try:
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def lock_file(fd: int, *, wait: bool = True) -> bool:
    """Lock the open file `fd` until it is closed. Returns False if a different process holds the lock and not `wait`.

    Returns True on a file system without locks.
    """
    return _lock(fd, wait=wait) is not False


def _lock(fd: int, *, wait: bool) -> bool | None:
    """Return True if `fd` is locked by this call, False if it cannot be, and None on a file system without locks."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return None if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL) else False
    return True


def is_own_process(pid: int) -> bool:
    """True if process `pid` on this machine belongs to this user according to /proc; False without /proc."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except (OSError, AttributeError):
        return False


def _check_owner(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{os.fspath(path)} belongs to the user {found.st_uid}, not to this one ({os.geteuid()})")
    is_open_to_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    if found.st_mode & stat.S_IWOTH or is_open_to_group:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(f"other users can write to {os.fspath(path)} (mode {mode:04o}); `chmod go-w` ends that")


def _is_own_group(gid: int) -> bool:
    """True for a private group of this user, as many systems create by default with group-writable files."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return (user.pw_gid, user.pw_name) == (gid, group.gr_name) and set(group.gr_mem) <= {user.pw_name}


def _user() -> str:
    return str(os.geteuid()) if hasattr(os, "geteuid") else getpass.getuser()


def make_socket_folder() -> Path:
    """Create a private folder for Unix sockets in the temporary directory, or in /tmp if the path of that is long."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) <= _MAX_FOLDER_CHARS:
            return Path(tempfile.mkdtemp(prefix="ddpilot-", dir=parent))
    return Path(tempfile.mkdtemp(prefix="ddpilot-"))
