# SPDX-License-Identifier: Apache-2.0
"""The current process of each rank that called `enable`, in a file next to its ring, for the observer of the node.

A rank may be a shell that runs Python twice, or again after an error: a new process of the same rank in the same job
folder. The newest process counts; until the shell has ended, a further one may follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddpilot.environments.private_files import read_own_text, write_own_text
from ddpilot.watch.job_folder import is_running


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """The process `pid` of a rank, started by the process `shell_pid`, which belongs to this rank alone."""

    pid: int
    started_s: float
    """Unix time in seconds, from `psutil.Process.create_time`."""
    shell_pid: int
    """The outermost ancestor of this rank alone; `pid` if the launcher started the rank's Python directly."""
    shell_started_s: float
    since_ns: int
    """When `enable` was called, by `time.monotonic_ns`; an earlier ring is from the program before an `exec`."""
    number: int
    """Number of earlier processes of this rank, including the program before an `exec`."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """The rank's description of its job: `name`, `command`, `world_size`, `local_world_size`, `local_rank`, ..."""

    @property
    def is_running(self) -> bool:
        """True while the rank's Python runs."""
        return is_running(self.pid, self.started_s)

    @property
    def may_return(self) -> bool:
        """True while a shell is running that may start Python again for this rank."""
        return self.shell_pid != self.pid and is_running(self.shell_pid, self.shell_started_s)

    def write(self, folder: Path, rank: int) -> None:
        """Write this to the job's `folder`. Raises `OSError`."""
        write_own_text(_path(folder, rank), json.dumps(asdict(self)))


def read_rank_process(folder: Path, rank: int) -> RankProcess | None:
    """Return the newest process of `rank`; None if there was none yet."""
    with suppress(OSError, ValueError, TypeError):
        return RankProcess(**json.loads(read_own_text(_path(folder, rank))))
    return None


def find_rank_processes(folder: Path) -> dict[int, RankProcess]:
    """Return the newest process of each rank."""
    names = [path.stem.removeprefix("rank") for path in folder.glob("rank*.process")]
    found = {int(name): read_rank_process(folder, int(name)) for name in names if name.isdecimal()}
    return {rank: each for rank, each in sorted(found.items()) if each is not None}


def error_path(folder: Path, rank: int) -> Path:
    """Return the file for the exception that ends `rank`."""
    return folder / f"rank{rank}.error"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.process"
