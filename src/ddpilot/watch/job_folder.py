# SPDX-License-Identifier: Apache-2.0
"""The folder of a watched job, with its rings, reports and `job.json`.

The folder is removed after a clean end of the job, and otherwise kept for `ddpilot watch`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import psutil

from ddpilot.environments.private_files import (
    check_own_folder,
    lock_file,
    make_own_folder,
    open_own_file,
    own_temporary_folder,
    read_own_text,
    write_own_text,
)
from ddpilot.errors import DdpilotError, RecordError
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.hook import find_rings

JOBS_VARIABLE = "DDPILOT_JOBS_DIR"
"""Names the folder that holds the jobs' folders; default: a folder of this user in the temporary directory."""

NUM_KEPT = 20
"""Number of ended jobs whose folders are kept, for `ddpilot watch`."""

_FORGOTTEN_S = 30 * 24 * 3600.0
"""A job of a different machine counts as running for at most this long: its process cannot be inspected here."""

OBSERVER = "observer"
"""File in a job's folder that is locked by the process that observes the job."""

_SAME_S = 1.0
"""Two readings of one process's start time differ by less than this; the system clock may be set in between."""

_ABOUT = "job.json"
_LOCK = ".lock"
_LOST_S = 3600.0
"""A folder without a readable `job.json` is removed if nothing in it has changed for this long."""

_ID = re.compile(r"\d{4}-\d{6}-[0-9a-f]{4,}")
_FILES = re.compile(r"(rank\d+\.\w+|job\.json|report\.(json|txt)|observer)(\.new)?")
_MAX_WORLD_SIZE = 1 << 20


def is_running(pid: int, started_s: float) -> bool:
    """Return True if the process `pid` that started at `started_s` (Unix time) is running."""
    try:
        process = psutil.Process(pid)
        is_it = abs(process.create_time() - started_s) < _SAME_S
        return is_it and process.status() != psutil.STATUS_ZOMBIE  # a zombie has ended and was not yet waited for
    except psutil.Error:
        return False


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """Description of a job. `pid` and `pid_started_s` identify the process that watches it."""

    id: str
    name: str
    command: tuple[str, ...]
    world_size: int
    host: str
    pid: int
    pid_started_s: float
    started_s: float
    """Unix time in seconds."""
    ranks: tuple[int, ...] = ()
    """The ranks of this node, whose rings are in the folder."""
    ended_s: float | None = None
    """When the job ended, as Unix time in seconds; None while it runs, or if the process that watched it was killed."""

    @property
    def is_elsewhere(self) -> bool:
        """True for a job of a different machine, whose processes can be inspected only there."""
        return self.host != platform.node()

    @property
    def is_running(self) -> bool:
        """True if the job has not ended and the process that watches it is alive; False for other machines' jobs."""
        if self.ended_s is not None or self.is_elsewhere:
            return False
        return is_running(self.pid, self.pid_started_s)

    @property
    def is_over(self) -> bool:
        """True if the job has certainly ended. A job of a different machine without `ended_s` is over after 30 days."""
        if self.ended_s is not None or not self.is_elsewhere:
            return not self.is_running
        return time.time() - self.started_s > _FORGOTTEN_S


def jobs_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that holds this user's jobs; it may not exist.

    If the configured folder is shared by several users, as one with mode 1777, this is a subfolder of this user's own.
    """
    given = environ.get(JOBS_VARIABLE)
    if not given:
        return own_temporary_folder()
    root = Path(os.path.realpath(given))
    with suppress(FileNotFoundError, NotADirectoryError):
        try:
            check_own_folder(root)
        except PermissionError:
            return root / own_temporary_folder().name
    return root


def open_root(root: Path) -> Path:
    """Return `root`, creating it if needed. Raises `OSError` if that fails or if other users can write to it."""
    try:
        return make_own_folder(root)
    except (PermissionError, NotADirectoryError) as error:
        raise type(error)(f"{error}; set {JOBS_VARIABLE} to a different folder") from error


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """While entered, no other process of this user creates, takes over or removes a job's folder in `root`."""
    fd = open_own_file(root / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        lock_file(fd)
        yield
    finally:
        os.close(fd)


def make_job_folder(name: str, world_size: int, ranks: tuple[int, ...] = ()) -> tuple[Path, JobInfo]:
    """Create a private folder for a job that this process watches; old ones are removed down to 20.

    Raises `OSError` if the disk is full or the folder belongs to a different user.
    """
    root = open_root(jobs_root())
    remove_old(root)
    folder = _make_numbered_folder(root)
    about = describe_job(folder.name, name, sys.argv, world_size, ranks or range(world_size))
    try:
        write_job_info(folder, about)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, about


def _make_numbered_folder(root: Path) -> Path:
    while True:
        folder = root / f"{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        with suppress(FileExistsError):  # a different job of this second has drawn the same number
            folder.mkdir(mode=0o700)
            return folder


def describe_job(number: str, name: str, command: Iterable[str], world_size: int, ranks: Iterable[int]) -> JobInfo:
    """Return the description of a job that starts now and that this process watches."""
    return JobInfo(
        id=number,
        name=name,
        command=tuple(command),
        world_size=world_size,
        host=platform.node(),
        pid=os.getpid(),
        pid_started_s=psutil.Process().create_time(),
        started_s=time.time(),
        ranks=tuple(ranks),
    )


def write_job_info(folder: Path, about: JobInfo) -> None:
    """Write `job.json` atomically."""
    write_own_text(folder / _ABOUT, json.dumps(asdict(about), indent=1))


def read_job_info(folder: Path) -> JobInfo:
    """Read the description of the job in `folder`. Raises `DdpilotError` if it is not a job folder of this user."""
    try:
        check_own_folder(folder)
        raw = json.loads(read_own_text(folder / _ABOUT))
        about = JobInfo(**{**raw, "command": tuple(raw["command"]), "ranks": tuple(raw["ranks"])})
        _check(about)
        return about
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DdpilotError(
            f"reading the job in {folder}",
            found=f"{type(error).__name__}: {error}",
            fix="`ddpilot watch` lists the jobs that there are",
        ) from error


def _fits(value: object, kind: str) -> bool:
    """True if `value` is possible for a field of the type `kind`, or as an item of it."""
    if "str" in kind:
        return isinstance(value, str)
    if "int" in kind:
        return type(value) is int and 0 <= value <= 1 << 31
    return (value is None and "None" in kind) or (type(value) in (int, float) and 0 <= value < 1e11)  # type: ignore[operator]


def _check(about: JobInfo) -> None:
    """Raise `TypeError` if a field of `about` has the wrong type or an impossible value."""
    for field in fields(about):
        value = getattr(about, field.name)
        items = value if isinstance(value, tuple) else (value,)
        if not all(_fits(item, str(field.type)) for item in items):
            raise TypeError(f"`{field.name}` is {value!r}")
    if not 1 <= about.world_size <= _MAX_WORLD_SIZE or any(rank >= about.world_size for rank in about.ranks):
        raise TypeError(f"`world_size` is {about.world_size}, with the ranks {about.ranks[:8]}")


def check_jobs_root() -> None:
    """Raise `DdpilotError` if the jobs folder exists but must not be read, because other users can write to it."""
    root = jobs_root()
    try:
        check_own_folder(root)
    except FileNotFoundError:
        return
    except OSError as error:
        fix = f"Nothing in it is read. Remove it, or set {JOBS_VARIABLE} to a folder of your own"
        raise DdpilotError(f"reading the jobs in {root}", found=str(error), fix=fix) from error


def list_jobs(root: Path | None = None) -> list[tuple[Path, JobInfo]]:
    """Return the folders of this user's jobs, newest first. Folders of other users are skipped."""
    root = root or jobs_root()
    found = []
    with suppress(OSError):  # it does not exist, or belongs to a different user
        for folder in check_own_folder(root).glob("*/"):
            with suppress(DdpilotError):  # one that is being created or removed
                found.append((folder, read_job_info(folder)))
    return sorted(found, key=lambda job: -job[1].started_s)


def remove_old(root: Path, num_kept: int = NUM_KEPT) -> None:
    """Remove the folders of ended jobs, except the newest `num_kept`, and unused folders without a readable job.

    Only folders that have the name of their job are removed: a job's folder that was renamed or copied is the user's.
    """
    jobs = list_jobs(root)
    ended = [folder for folder, about in jobs if about.is_over and folder.name == about.id]
    for folder in ended[num_kept:]:
        remove(folder)
    known = {folder for folder, _ in jobs}
    with suppress(OSError):
        for folder in root.glob("*/"):
            if folder not in known and _is_lost(folder):
                remove(folder)


def _is_lost(folder: Path) -> bool:
    """True for the folder of a job whose observer never wrote `job.json` and which no process uses any longer."""
    if not _ID.fullmatch(folder.name):
        return False
    try:
        check_own_folder(folder)
        entries = [*os.scandir(folder)]
        changed_s = max(os.lstat(each).st_mtime for each in (folder, *entries))
    except OSError:
        return False
    if not all(_FILES.fullmatch(each.name) for each in entries) or time.time() - changed_s < _LOST_S:
        return False
    return not any(map(_may_run, find_rings(folder).values()))


def _may_run(ring: Path) -> bool:
    """True unless the process that records into `ring` is known to have ended."""
    try:
        log = read_ring(ring, newest=1)
    except (RecordError, OSError):
        return False
    if log.host != platform.node():
        return time.time() - log.started_unix_ns / 1e9 < _FORGOTTEN_S
    try:
        return psutil.Process(log.pid).create_time() < log.started_unix_ns / 1e9 + 1.0
    except psutil.Error:
        return False


def close_job(folder: Path, about: JobInfo, *, is_clean: bool) -> None:
    """Remove the folder of a job that ended cleanly; otherwise record in it when the job ended."""
    if is_clean:
        remove(folder)
        return
    with suppress(OSError):  # on a full disk the job counts as ended once this process is gone
        write_job_info(folder, replace(about, ended_s=time.time()))


def remove(folder: Path) -> None:
    """Remove a job's folder; does nothing if it does not exist."""
    shutil.rmtree(folder, ignore_errors=True)
