# SPDX-License-Identifier: Apache-2.0
"""The folder of a watched job: its rings, its reports, and who it is; removed after a clean end, else kept a while."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil

from ddpilot.environments.own_files import (
    check_own_folder,
    lock_file,
    make_own_folder,
    open_own_file,
    own_temporary_folder,
    read_own_text,
    write_own_text,
)
from ddpilot.errors import DdpilotError, RecordError
from ddpilot.record.hook import find_rings
from ddpilot.record.reading import read_ring

JOBS_VARIABLE = "DDPILOT_JOBS_DIR"
"""Names the folder that jobs have theirs in; default: one of the user's own in the temporary directory."""

NUM_KEPT = 20
"""Jobs whose folders stay, for `ddpilot watch`."""

_FORGOTTEN_S = 30 * 24 * 3600.0
"""The longest that a job of another machine is taken for a running one: nobody here can look at its process."""

OBSERVER = "observer"
"""Locked in a job's folder by the process that observes it."""

_ABOUT = "job.json"
_LOCK = ".lock"
_LOST_S = 3600.0
"""A folder without a readable `job.json` is removed when nothing in it has changed for so long."""

_ID = re.compile(r"\d{4}-\d{6}-[0-9a-f]{4,}")
_FILES = re.compile(r"(rank\d+\.\w+|job\.json|report\.(json|txt)|observer)(\.new)?")
_MAX_WORLD_SIZE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class JobAbout:
    """Who a job is. `pid` with `pid_started_s` is the process that watches it."""

    id: str
    name: str
    command: tuple[str, ...]
    world_size: int
    host: str
    pid: int
    pid_started_s: float
    started_s: float
    """Seconds since 1970."""
    ranks: tuple[int, ...] = ()
    """Those of this node, of which there are rings here."""
    ended_s: float | None = None
    """When it ended, in seconds since 1970; None while it runs, and where who watched it was killed."""

    @property
    def is_elsewhere(self) -> bool:
        """True for a job of another machine: whether its processes live can be seen only there."""
        return self.host != platform.node()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, and the process that watches it lives, as far as can be told on this machine."""
        if self.ended_s is not None or self.is_elsewhere:
            return False
        try:
            process = psutil.Process(self.pid)
            is_it = abs(process.create_time() - self.pid_started_s) < 1.0
            return is_it and process.status() != psutil.STATUS_ZOMBIE  # ended, and not yet waited for
        except psutil.Error:
            return False

    @property
    def is_over(self) -> bool:
        """Whether it has ended for certain. On another machine a job that never said so is over after 30 days."""
        if self.ended_s is not None or not self.is_elsewhere:
            return not self.is_running
        return time.time() - self.started_s > _FORGOTTEN_S


def jobs_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's jobs have their folders, existing or not.

    In a folder that several users share, such as one with mode 1777, that is one of this user's own.
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
    """`root`, made if it does not exist. Raises `OSError` if that fails, or if other users can write to it."""
    try:
        return make_own_folder(root)
    except (PermissionError, NotADirectoryError) as error:
        raise type(error)(f"{error}; {JOBS_VARIABLE} can name another one") from error


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """While it is entered, no other process of this user makes, takes over or removes a job's folder in `root`."""
    fd = open_own_file(root / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        lock_file(fd)
        yield
    finally:
        os.close(fd)


def make_job_folder(name: str, world_size: int, ranks: tuple[int, ...] = ()) -> tuple[Path, JobAbout]:
    """A new folder for a job that this process watches, private to the user; old ones are removed down to 20.

    Raises `OSError` where there is no room, or where somebody else has the place.
    """
    root = open_root(jobs_root())
    remove_old(root)
    about = JobAbout(
        id=f"{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}",
        name=name,
        command=tuple(sys.argv),
        world_size=world_size,
        host=platform.node(),
        pid=os.getpid(),
        pid_started_s=psutil.Process().create_time(),
        started_s=time.time(),
        ranks=ranks or tuple(range(world_size)),
    )
    folder = root / about.id
    folder.mkdir(mode=0o700)
    try:
        write_about(folder, about)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, about


def write_about(folder: Path, about: JobAbout) -> None:
    """Write `job.json`: all of it or nothing."""
    write_own_text(folder / _ABOUT, json.dumps(asdict(about), indent=1))


def read_about(folder: Path) -> JobAbout:
    """Who the job of `folder` is. Raises `DdpilotError` if that is not the folder of a job of this user."""
    try:
        check_own_folder(folder)
        said = json.loads(read_own_text(folder / _ABOUT))
        about = JobAbout(**{**said, "command": tuple(said["command"]), "ranks": tuple(said["ranks"])})
        _check(about)
        return about
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DdpilotError(
            f"reading the job in {folder}",
            found=f"{type(error).__name__}: {error}",
            fix="`ddpilot watch` lists the jobs that there are",
        ) from error


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_time(value: object) -> bool:
    return _is_number(value) and 0 <= float(value) < 1e11  # type: ignore[arg-type]  # a number


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 31


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": _is_count,
    "float": _is_time,
    "float | None": lambda value: value is None or _is_time(value),
    "tuple[str, ...]": lambda value: all(isinstance(each, str) for each in value),
    "tuple[int, ...]": lambda value: all(map(_is_count, value)),
}
"""By the type of a field of `JobAbout`."""


def _check(about: JobAbout) -> None:
    """Raise `TypeError` if a field of `about` does not have its type, or a number nobody can have written."""
    for field in fields(about):
        value = getattr(about, field.name)
        if not _CHECKS[str(field.type)](value):
            raise TypeError(f"`{field.name}` is {value!r}")
    if not 1 <= about.world_size <= _MAX_WORLD_SIZE or any(rank >= about.world_size for rank in about.ranks):
        raise TypeError(f"`world_size` is {about.world_size}, with the ranks {about.ranks[:8]}")


def check_jobs_root() -> None:
    """Raises `DdpilotError` if the folder of jobs is there, and may not be read since others can write to it."""
    root = jobs_root()
    try:
        check_own_folder(root)
    except FileNotFoundError:
        return
    except OSError as error:
        fix = f"Nothing in it is read. Remove it, or set {JOBS_VARIABLE} to a folder of your own"
        raise DdpilotError(f"reading the jobs in {root}", found=str(error), fix=fix) from error


def list_jobs(root: Path | None = None) -> list[tuple[Path, JobAbout]]:
    """The folders of this user's jobs, the newest first. Folders of other users are left out."""
    root = root or jobs_root()
    found = []
    with suppress(OSError):  # there is none, or it is another user's
        for folder in check_own_folder(root).glob("*/"):
            with suppress(DdpilotError):  # one that is just being made or removed
                found.append((folder, read_about(folder)))
    return sorted(found, key=lambda job: -job[1].started_s)


def remove_old(root: Path, num_kept: int = NUM_KEPT) -> None:
    """Remove the folders of jobs that have ended, except the newest, and those that no job can be read from."""
    jobs = list_jobs(root)
    ended = [folder for folder, about in jobs if about.is_over]
    for folder in ended[num_kept:]:
        remove(folder)
    known = {folder for folder, _ in jobs}
    with suppress(OSError):
        for folder in root.glob("*/"):
            if folder not in known and _is_lost(folder):
                remove(folder)


def _is_lost(folder: Path) -> bool:
    """True for the folder of a job whose observer never wrote who it is, and which nothing uses any more."""
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
    """True unless the process that records into `ring` is known to be gone."""
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


def close_job(folder: Path, about: JobAbout, *, is_clean: bool) -> None:
    """The job has ended: its folder goes after a clean end, else it says so."""
    if is_clean:
        remove(folder)
        return
    with suppress(OSError):  # on a full disk it is an ended job of a process that lives
        write_about(folder, replace(about, ended_s=time.time()))


def remove(folder: Path) -> None:
    """Remove a job's folder; a second call does nothing."""
    shutil.rmtree(folder, ignore_errors=True)
