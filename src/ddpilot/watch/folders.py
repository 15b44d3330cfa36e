# SPDX-License-Identifier: Apache-2.0
"""The folder of a watched job: its rings, its reports, and who it is; removed after a clean end, else kept a while."""

from __future__ import annotations

import getpass
import json
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from ddpilot.errors import DdpilotError

JOBS_VARIABLE = "DDPILOT_JOBS_DIR"
"""Names the folder that jobs have theirs in; default: one of the user's own in the temporary directory."""

NUM_KEPT = 20
"""Jobs whose folders stay, for `ddpilot watch`."""

_FORGOTTEN_S = 30 * 24 * 3600.0
"""The longest that a job of another machine is taken for a running one: nobody here can look at its process."""

_ABOUT = "job.json"


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
    def is_running(self) -> bool:
        """Whether it has not ended, and the process that watches it lives, as far as can be told on this machine."""
        if self.ended_s is not None or self.host != platform.node():
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
        if self.ended_s is not None or self.host == platform.node():
            return not self.is_running
        return time.time() - self.started_s > _FORGOTTEN_S


def jobs_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's jobs have their folders, existing or not."""
    given = environ.get(JOBS_VARIABLE)
    return Path(given) if given else Path(tempfile.gettempdir()) / f"ddpilot-{_user()}"


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()


def open_root(root: Path) -> Path:
    """`root`, made where it is not there. Raises `OSError` where that fails, or where somebody else has the place."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(root)
    if hasattr(os, "getuid") and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid()):
        raise PermissionError(f"{root} is not a folder of this user; {JOBS_VARIABLE} can name another one")
    return root


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
    draft = folder / f"{_ABOUT}.new"
    draft.write_text(json.dumps(asdict(about), indent=1), encoding="utf-8")
    os.replace(draft, folder / _ABOUT)


def read_about(folder: Path) -> JobAbout:
    """Who the job of `folder` is. Raises `DdpilotError` where that is no job's folder."""
    try:
        said = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        return JobAbout(**{**said, "command": tuple(said["command"]), "ranks": tuple(said["ranks"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DdpilotError(
            f"reading the job in {folder}",
            found=f"{type(error).__name__}: {error}",
            fix="`ddpilot watch` lists the jobs that there are",
        ) from error


def list_jobs(root: Path | None = None) -> list[tuple[Path, JobAbout]]:
    """The folders of this user's jobs on this machine, the newest first."""
    found = []
    for folder in (root or jobs_root()).glob("*/"):
        with suppress(DdpilotError):  # one that is just being made or removed
            found.append((folder, read_about(folder)))
    return sorted(found, key=lambda job: -job[1].started_s)


def remove_old(root: Path, num_kept: int = NUM_KEPT) -> None:
    """Remove the folders of jobs that have ended, except the newest."""
    ended = [folder for folder, about in list_jobs(root) if about.is_over]
    for folder in ended[num_kept:]:
        remove(folder)


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
