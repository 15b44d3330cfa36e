# SPDX-License-Identifier: Apache-2.0
"""The process of a rank that `enable` was called in, as a file beside its ring: for the observer of the node.

A rank may be a shell that runs Python twice, or runs it again after an error: another process of the same rank, in the
same job's folder. The newest counts, and until the shell has ended nobody knows whether a next one comes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ddpilot.environments.own_files import read_own_text, write_own_text

_SAME_S = 1.0
"""The start of one process, read twice, differs by less: the system's clock may be set in between."""


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """Process `pid` of a rank, started by the process `shell_pid` of this rank alone."""

    pid: int
    started_s: float
    """Seconds since 1970, as `psutil.Process.create_time` says."""
    shell_pid: int
    """The outermost ancestor that is of this rank alone; `pid` if the launcher started the rank's Python itself."""
    shell_started_s: float
    since_ns: int
    """When `enable` was called, by `time.monotonic_ns`: a ring that began earlier is of the image before an `exec`."""
    number: int
    """How many processes of this rank were there before, an `exec` included."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """What this rank says of its job: `name`, `command`, `world_size`, `local_world_size`, `local_rank`, ..."""

    @property
    def is_running(self) -> bool:
        """True while the rank's Python runs."""
        return _is_running(self.pid, self.started_s)

    @property
    def may_return(self) -> bool:
        """True while the shell runs that may start Python once more for this rank."""
        return self.shell_pid != self.pid and _is_running(self.shell_pid, self.shell_started_s)

    def write(self, folder: Path, rank: int) -> None:
        """Note it in the job's `folder`. Raises `OSError`."""
        write_own_text(_path(folder, rank), json.dumps(asdict(self)))


def read_rank_process(folder: Path, rank: int) -> RankProcess | None:
    """The newest process of `rank`; None if there was none yet."""
    with suppress(OSError, ValueError, TypeError):
        return RankProcess(**json.loads(read_own_text(_path(folder, rank))))
    return None


def find_rank_processes(folder: Path) -> dict[int, RankProcess]:
    """By rank, its newest process."""
    names = [path.stem.removeprefix("rank") for path in folder.glob("rank*.process")]
    found = {int(name): read_rank_process(folder, int(name)) for name in names if name.isdecimal()}
    return {rank: each for rank, each in sorted(found.items()) if each is not None}


def error_path(folder: Path, rank: int) -> Path:
    """Where the exception is noted that ends `rank`."""
    return folder / f"rank{rank}.error"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.process"


def _is_running(pid: int, started_s: float) -> bool:
    try:
        process = psutil.Process(pid)
        is_it = abs(process.create_time() - started_s) < _SAME_S
        return is_it and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
