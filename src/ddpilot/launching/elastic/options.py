# SPDX-License-Identifier: Apache-2.0
"""What `ddpilot run` can be told, checked when it is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ddpilot.errors import LaunchError
from ddpilot.launching.elastic.stopping import DEFAULT_SIGNALS

TargetKind = Literal["script", "module", "program"]
DEFAULT_PORT = 29500
"""Where nodes meet if no port is given; torchrun's."""

_COUNT_WORDS = ("auto", "cpu", "gpu")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one run of a script on this node. Raises LaunchError for a value that cannot be meant."""

    target: str
    """Path of the script, directory or zip file with a `__main__.py`, name of the module, or program."""

    kind: TargetKind = "script"
    """What `target` is: a Python script, a module to run as `python -m` does, or any program."""

    args: tuple[str, ...] = ()
    """Arguments of the script. torch's agent replaces "${local_rank}" in them."""

    nproc_per_node: int | str = "auto"
    """Ranks on this node. "auto": the visible accelerators, else 1; "gpu": the visible accelerators, at least one;
    "cpu": the cores that this process may use."""

    nnodes: tuple[int, int] = (1, 1)
    """Fewest and most nodes. They differ only with a rendezvous backend of torch's ("c10d")."""

    node_rank: int = 0
    """Number of this node, 0 to nnodes - 1. Node 0 hosts the store at `master_addr`:`master_port`."""

    master_addr: str | None = None
    """Name or address of node 0. None: loopback on one node; on several it has to be given."""

    master_port: int | None = None
    """TCP port on node 0. None: a free one on one node, 29500 on several."""

    local_addr: str | None = None
    """Address of this node that the others are told, for torch's backends. None: torch finds one."""

    rdzv_backend: str = "static"
    """How nodes find each other: "static" is ddpilot's own, by node rank; "c10d", "etcd-v2", ... are torch's."""

    rdzv_endpoint: str = ""
    """host:port of a rendezvous of torch's; with "static" another way to give `master_addr` and `master_port`."""

    rdzv_id: str = "none"
    """Name of the job, the same on every node."""

    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    """More settings of a rendezvous backend of torch's."""

    rdzv_timeout_s: float = 900.0
    """Seconds that nodes wait for each other at the start and at each restart."""

    node_timeout_s: float = 30.0
    """Seconds without a sign of another node after which this node ends its ranks."""

    max_restarts: int = 0
    """How often all ranks are started again after one failed."""

    monitor_interval_s: float = 0.1
    """Seconds between two looks at the ranks."""

    shutdown_timeout_s: float = 30.0
    """Seconds that ranks have after a signal to `ddpilot run`, for instance to save a checkpoint, before SIGKILL."""

    signals: tuple[str, ...] = DEFAULT_SIGNALS
    """Signals that are passed on to the ranks, which then have `shutdown_timeout_s` to end."""

    role: str = "default"
    """Name of these ranks, which torch's agent passes on as ROLE_NAME."""

    log_dir: Path | None = None
    """Folder for the files of `redirects` and `tee`; alone, it means tee of both streams."""

    redirects: str = "0"
    """Streams that go to files instead of the screen, as torchrun has it: "3", "0:1,1:2"."""

    tee: str = "0"
    """Streams that go to files and to the screen."""

    shown_local_ranks: frozenset[int] | None = None
    """Local ranks whose output is shown; None: all."""

    def __post_init__(self) -> None:
        count = self.nproc_per_node
        if not (isinstance(count, int) and 1 <= count <= 1024) and count not in _COUNT_WORDS:
            raise _refusal("--nproc-per-node", count, "Give a number of ranks from 1 to 1024, or auto, gpu or cpu")
        fewest, most = self.nnodes
        if not 1 <= fewest <= most:
            raise _refusal("--nnodes", f"{fewest}:{most}", "Give a number of nodes, or MIN:MAX with 1 <= MIN <= MAX")
        if self.is_static and fewest != most:
            fix = "With the static rendezvous give one number; a range needs --rdzv-backend c10d"
            raise _refusal("--nnodes", f"{fewest}:{most}", fix)
        if self.is_static and not 0 <= self.node_rank < most:
            fix = f"Nodes count from 0: with --nnodes {most} the last is {most - 1}"
            raise _refusal("--node-rank", self.node_rank, fix)
        if self.master_port is not None and not 0 <= self.master_port <= 65535:
            raise _refusal("--master-port", self.master_port, "Give a port from 1 to 65535")
        if self.max_restarts < 0:
            raise _refusal("--max-restarts", self.max_restarts, "Give 0 or more")
        for name, seconds in (
            ("--rdzv-timeout", self.rdzv_timeout_s),
            ("--node-timeout", self.node_timeout_s),
            ("--monitor-interval", self.monitor_interval_s),
            ("--shutdown-timeout", self.shutdown_timeout_s),
        ):
            if not 0 < seconds < 1e9:
                raise _refusal(name, f"{seconds:g}", "Give seconds, more than 0")

    @property
    def is_static(self) -> bool:
        """Whether nodes meet by ddpilot's own rendezvous."""
        return self.rdzv_backend == "static"

    @property
    def name(self) -> str:
        """The target as messages call it."""
        return f"-m {self.target}" if self.kind == "module" else Path(self.target).name or self.target


def _refusal(option: str, value: object, fix: str) -> LaunchError:
    return LaunchError(f"reading {option}", found=f"{value!r}", fix=fix)
