# SPDX-License-Identifier: Apache-2.0
"""The processes of the ranks that called `enable`, on this node, and the connection of their observers to other nodes.

A rank may be a shell that runs Python twice, or again after an error: a new process of the same rank in the same job
folder. The newest process counts; until the shell has ended, a further one may follow.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpilot.environments.private_files import read_own_text, write_own_text
from ddpilot.environments.topology import Topology
from ddpilot.launching.elastic.rendezvous.heartbeat import Heartbeat
from ddpilot.launching.elastic.rendezvous.node_state import NodeState, StoreMailbox
from ddpilot.watch.job_folder import is_running

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_PULSE_S = 1.0
_FLUSH_S = 1.0
_CONNECT_LIMIT = timedelta(hours=1)
_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"


def describe_connection(topology: Topology, name: str, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of `StoreConnection` as JSON-serializable values; None if there is only one node."""
    if topology.nnodes == 1:
        return None
    return {
        "node_rank": topology.node_rank,
        "nnodes": topology.nnodes,
        "nproc_per_node": topology.local_world_size,
        "target": name,
        "attempt": int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "run_id": environ.get("TORCHELASTIC_RUN_ID", ""),
        "addr": topology.master_addr,
        "port": topology.master_port,
    }


class StoreConnection:
    """The connection to the observers of the other nodes, through the store of the ranks.

    `arguments`: from `describe_connection`. A separate thread waits for that store and holds the only connection to it.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        mine = {name: arguments[name] for name in ("node_rank", "nnodes", "nproc_per_node", "target", "attempt")}
        me = NodeState(host=platform.node(), pid=os.getpid(), **mine)
        self._peers = Heartbeat(self._connect, me, pulse_s=_PULSE_S)
        self.post: StoreMailbox = self._peers.open_mailbox(me.attempt)

    def close(self) -> None:
        """Wait at most one second for pending writes to reach the store, then disconnect."""
        self._peers.flush(_FLUSH_S)
        self._peers.stop()

    def _connect(self) -> Store:
        os.environ.setdefault(_LEVEL_VARIABLE, "ERROR")  # else torch logs host names that do not resolve
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        to = self._arguments
        store = TCPStore(to["addr"], to["port"], is_master=False, timeout=_CONNECT_LIMIT, wait_for_workers=False)
        return PrefixStore(f"ddpilot-watch/{to['run_id']}/{to['attempt']}", store)


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
