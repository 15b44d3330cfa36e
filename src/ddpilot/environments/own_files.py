# SPDX-License-Identifier: Apache-2.0
"""Open files and folders of this user alone: in a folder that others can write to, a name may be another user's.

Every file that ddpilot opens because of its name, and has not just made itself, is opened here. No link is followed,
and the owner and the mode are those of what has been opened, so that nothing can be exchanged in between.
"""

from __future__ import annotations

import errno
import getpass
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_WITHOUT_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_ROOT = 0
_UNLOCKED_S = 60.0
"""A folder that is not locked after so long is one that a killed process has left."""


def own_temporary_folder() -> Path:
    """Where this user's files lie in the temporary directory under names that others can guess; existing or not."""
    return Path(tempfile.gettempdir()) / f"ddpilot-{_user()}"


def make_own_folder(folder: Path) -> Path:
    """`folder`, made with mode 0700 if there is none, and checked as by `check_own_folder`. Raises `OSError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return check_own_folder(folder)


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder of this user in the temporary directory while it is entered; its name begins with `prefix`.

    It is locked, so that the next one with this prefix removes it if this process is killed.
    """
    parent = Path(tempfile.gettempdir())
    with suppress(OSError):  # what cannot be listed stays
        for folder in parent.glob(f"{prefix}*"):
            if time.time() - os.lstat(folder).st_mtime > _UNLOCKED_S:
                _remove_if_left(folder)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    fd = os.open(folder, os.O_RDONLY | _WITHOUT_LINKS)
    try:
        lock_file(fd, wait=False)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # it is another user's, or gone meanwhile
        fd = os.open(check_own_folder(folder), os.O_RDONLY | _WITHOUT_LINKS)
        try:
            if lock_file(fd, wait=False):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def check_own_folder(folder: Path) -> Path:
    """`folder`, if it is a folder of this user that others cannot write to. Raises `PermissionError` if it is not.

    A link is not a folder. `FileNotFoundError` if there is nothing with this name.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        raise NotADirectoryError(f"{folder} is {kind}, where a folder of this user is needed")
    _check_owner(folder, found, may_be_roots=False)
    return folder


def open_own_file(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600, *, may_be_roots: bool = False
) -> int:
    """A descriptor of the regular file `path`, opened with `flags`; O_TRUNC empties it after the check.

    Raises `PermissionError` for a file that belongs to another user or that others can write to, `may_be_roots` lets
    root's through; `OSError` for a symbolic link, for anything but a regular file, and if `path` cannot be opened.
    """
    fd = os.open(path, (flags & ~os.O_TRUNC) | _WITHOUT_LINKS, mode)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        _check_owner(path, found, may_be_roots=may_be_roots)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_own_fifo(path: str | os.PathLike[str]) -> int:
    """A descriptor to write to the pipe `path` of this user, which never blocks.

    Raises `OSError` if no process reads from it, or if it is not a pipe of this user's.
    """
    fd = os.open(path, os.O_WRONLY | _WITHOUT_LINKS | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISFIFO(found.st_mode):
            raise OSError(f"{os.fspath(path)} is not a pipe")
        _check_owner(path, found, may_be_roots=False)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_own_text(path: str | os.PathLike[str]) -> str:
    """The text of the file `path`, which is UTF-8. Raises `OSError` as `open_own_file` does."""
    with open(open_own_file(path), encoding="utf-8", errors="replace") as file:
        return file.read()


def write_own_text(path: Path, text: str) -> None:
    """Replace the file `path` with `text`: all of it or nothing, for this user alone (mode 0600). Raises `OSError`."""
    draft = path.with_name(f"{path.name}.new")
    with suppress(FileNotFoundError):
        draft.unlink()  # of a process that was killed while it wrote
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
    """Lock the open file `fd` for this process until it is closed; False if another process has it and not `wait`.

    A file system without locks counts as locked.
    """
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
    return True


def is_own_process(pid: int) -> bool:
    """True if the process `pid` of this machine belongs to this user, as far as /proc says so (Linux)."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except (OSError, AttributeError):
        return False


def _check_owner(path: str | os.PathLike[str], found: os.stat_result, *, may_be_roots: bool) -> None:
    if not hasattr(os, "geteuid"):
        return
    allowed = {os.geteuid(), _ROOT} if may_be_roots else {os.geteuid()}
    if found.st_uid not in allowed:
        raise PermissionError(f"{os.fspath(path)} belongs to the user {found.st_uid}, not to this one ({os.geteuid()})")
    is_open_to_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    if found.st_mode & stat.S_IWOTH or is_open_to_group:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(f"other users can write to {os.fspath(path)} (mode {mode:04o}); `chmod go-w` ends that")


def _is_own_group(gid: int) -> bool:
    """True for a group of this user alone, as many systems give every user: files may be open to it by default."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return (user.pw_gid, user.pw_name) == (gid, group.gr_name) and set(group.gr_mem) <= {user.pw_name}


def _user() -> str:
    return str(os.geteuid()) if hasattr(os, "geteuid") else getpass.getuser()
