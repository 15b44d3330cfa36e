# SPDX-License-Identifier: Apache-2.0
"""The lock with which one process writes to a directory of checkpoints, and its errors for users."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import weakref
from collections.abc import Callable
from pathlib import Path

from ddpilot.checkpoint.atomic_files import remove_new
from ddpilot.environments.private_files import open_own_file
from ddpilot.errors import CheckpointError

_WRITER = ".writer"
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of file systems without locks."""
_PER_TASK = """such as f"ckpt/{os.environ['SLURM_ARRAY_TASK_ID']}\""""

_OF_JOB = re.compile(r"\(job (\d+), start (\d+)(?:, array task \d+)?\)$")
_OF_TASK = re.compile(r", array task (\d+)\)")


def lock_for_writing(
    folder: Path, report: Callable[[str], None], *, has_checkpoints: Callable[[], bool]
) -> Writer | None:
    """Lock the existing directory `folder` for this process; None if it cannot be locked.

    `report`: called if the lock is taken from an earlier start of this Slurm job, and if checkpoints there, by
    `has_checkpoints`, are of a different task of a job array. Raises CheckpointError as `CheckpointDir.claim` does.
    """
    did = f"preparing to save in {folder}"
    try:
        writer = _lock(folder, report)
    except WriterTakenError as error:
        raise CheckpointError(
            did,
            found=f"a different job writes its checkpoints there: {error.owner}",
            fix=f"Give each task of the array its own: {_PER_TASK}"
            if error.array_task
            else "Choose a different `checkpoint_dir`, or wait until that job has ended.",
        ) from error
    except NotAFileError as error:
        fix = "Remove it, or choose a `checkpoint_dir` in which other users cannot write."
        raise CheckpointError(did, found=str(error), fix=fix) from error
    if writer is not None and writer.array_task_before and has_checkpoints():
        report(
            f"the checkpoints in {folder} are of array task {writer.array_task_before}: if each task "
            f"is a training of its own, give it its own `checkpoint_dir`, {_PER_TASK}"
        )
    return writer


def _lock(folder: Path, report: Callable[[str], None]) -> Writer | None:
    """Lock the directory, also if an earlier start of this Slurm job still lives on a node that Slurm has lost."""
    try:
        return Writer.of(folder)
    except WriterTakenError as error:
        if not error.is_earlier_start:
            raise
        report(
            f"{error.owner} still holds {folder}: it is an earlier start of this job, on a node that Slurm has "
            "lost; this start writes there from now on"
        )
        return Writer.replace(folder)


def _job_number() -> str:
    return os.environ.get("SLURM_JOB_ID", "")


def _array_task() -> str:
    """Number of this task of a Slurm job array; "" outside one."""
    return os.environ.get("SLURM_ARRAY_TASK_ID", "")


def _as_owner() -> str:
    """This process's entry in a lock file."""
    task = f", array task {_array_task()}" if _array_task() else ""
    job = f" (job {_job_number()}, start {_job_start()}{task})" if _job_number() else ""
    return f"process {os.getpid()} on {socket.gethostname()}{job}"


def _other_task(owner: str) -> str:
    """The array's task that this entry of a lock file is from, if this process is one of a different task; else ""."""
    found = _OF_TASK.search(owner)
    return found[1] if found is not None and _array_task() not in ("", found[1]) else ""


def _job_start() -> int:
    """How often the Slurm job has started before."""
    text = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


class WriterTakenError(Exception):
    """A live process writes to the directory; `owner` is its entry in the lock file, e.g. "process 4242 on node7"."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        job = _OF_JOB.search(owner)
        self.is_earlier_start = job is not None and job[1] == _job_number() and int(job[2]) < _job_start()
        """True if it is an earlier start of this Slurm job: Slurm has requeued the job without it, on a lost node."""
        self.array_task = _other_task(owner)
        """Its task of a job array, if this process is in a different one; else ""."""
        super().__init__(owner)


class NotAFileError(OSError):
    """The name of a lock file belongs to a symbolic link or to something else that is not a regular file."""


class Writer:
    """The lock with which one process writes to a directory, until it is garbage-collected or the process ends.

    The kernel holds it for the whole process: a second `Writer.of` in the same process returns the same object, and a
    forked worker does not hold it. On file systems without locks, other writers are not detected.
    """

    def __init__(self, descriptor: int, before: str = "") -> None:
        self.pid = os.getpid()
        self.array_task_before = _other_task(before)
        """The task of a job array that wrote here last, if this process is in a different one; else ""."""
        self._file = _identity(os.fstat(descriptor))
        weakref.finalize(self, os.close, descriptor)

    def is_of(self, folder: Path) -> bool:
        """False if the lock file in `folder` was removed or replaced, so that it excludes no other process."""
        try:
            return _identity(os.lstat(folder / _WRITER)) == self._file
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a file system that does not respond now
            return True

    @classmethod
    def of(cls, folder: Path) -> Writer | None:
        """Lock the existing directory `folder`; None if it cannot be locked.

        Raises WriterTakenError, and NotAFileError for a symbolic link in place of the lock file, which a different
        user of a shared directory may have made.
        """
        path = folder / _WRITER
        with contextlib.suppress(FileNotFoundError):
            held = _held.get(_identity(os.lstat(path)))
            if held is not None and held.pid == os.getpid():
                return held
        try:
            descriptor = open_own_file(path, os.O_RDWR | os.O_CREAT)
        except PermissionError:  # a different user's: `probe` checks whether the directory is writable
            return None
        except OSError as error:
            if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
                raise NotAFileError(f"{path} is {_kind(path)}, where a file of this user is needed") from error
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner_in(descriptor)
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                return None
            raise WriterTakenError(owner or "a process that has not written its number yet") from None
        before = _owner_in(descriptor)
        with contextlib.suppress(OSError):  # a full disk: only the lock matters
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{_as_owner()}\n".encode(), 0)
        remove_new(folder)
        made = _held[_identity(os.fstat(descriptor))] = cls(descriptor, before)
        return made

    @classmethod
    def replace(cls, folder: Path) -> Writer | None:
        """Lock `folder` by a new lock file. The process that holds the old one is refused when it saves again."""
        with contextlib.suppress(FileNotFoundError):
            (folder / _WRITER).unlink()
        return cls.of(folder)


_held: weakref.WeakValueDictionary[tuple[int, int], Writer] = weakref.WeakValueDictionary()
"""Keyed by device and inode of the lock file. Closing a second descriptor of it would release the process's lock."""


def _owner_in(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace").strip()


def _kind(path: Path) -> str:
    return "a symbolic link" if path.is_symlink() else "not a regular file"


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino
