# SPDX-License-Identifier: Apache-2.0
"""Options of ``ddpilot run``, validated on construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ddpilot.errors import LaunchError
from ddpilot.launching.elastic.signals import DEFAULT_SIGNALS
from ddpilot.launching.options import is_nproc

TargetKind = Literal["script", "module", "program"]
DEFAULT_PORT = 29500
"""Default port of the store; the same as torchrun's."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one run of a script on this node. Raises LaunchError for an invalid value."""

    target: str
    """Path of the script, or of a directory or zip file with a `__main__.py`; module name; or program."""

    kind: TargetKind = "script"
    """Kind of `target`: a Python script, a module to run as with `python -m`, or any program."""

    args: tuple[str, ...] = ()
    """Arguments of the script. torch's agent replaces "${local_rank}" in them."""

    nproc_per_node: int | str = "auto"
    """Ranks on this node. "auto": one per visible accelerator, else 1; "gpu": one per visible accelerator, an error if
    there is none; "cpu": one per core that this process may use."""

    nnodes: tuple[int, int] = (1, 1)
    """Minimum and maximum number of nodes. They may differ only with a rendezvous backend of torch ("c10d")."""

    node_rank: int = 0
    """Rank of this node, 0 to nnodes - 1. Node 0 hosts the store at `master_addr`:`master_port`."""

    master_addr: str | None = None
    """Name or address of node 0. None: loopback on one node; required on several."""

    master_port: int | None = None
    """TCP port on node 0. None: a free port on one node, 29500 on several."""

    local_addr: str | None = None
    """Address of this node for the other nodes, with torch's backends. None: determined by torch."""

    rdzv_backend: str = "static"
    """How nodes find each other: "static" is ddpilot's own, by node rank; "c10d", "etcd-v2", ... are torch's."""

    rdzv_endpoint: str = ""
    """host:port for torch's rendezvous backends; with "static", an alternative to `master_addr` and `master_port`."""

    rdzv_id: str = "none"
    """Id of the job, the same on every node."""

    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    """Further settings for torch's rendezvous backends."""

    rdzv_timeout_s: float = 900.0
    """Seconds that nodes wait for each other at the start and at each restart."""

    node_timeout_s: float = 30.0
    """Seconds without a heartbeat from another node after which this node terminates its ranks."""

    max_restarts: int = 0
    """Maximum number of times that all ranks are restarted after a failure."""

    monitor_interval_s: float = 0.1
    """Seconds between two polls of the ranks."""

    shutdown_timeout_s: float = 30.0
    """Seconds that ranks have after a signal to `ddpilot run`, for instance to save a checkpoint, before SIGKILL."""

    signals: tuple[str, ...] = DEFAULT_SIGNALS
    """Signals that are passed on to the ranks, which then have `shutdown_timeout_s` to exit."""

    role: str = "default"
    """Role name of these ranks, passed to them as ROLE_NAME."""

    log_dir: Path | None = None
    """Folder for the files of `redirects` and `tee`; given alone, it implies tee of both streams."""

    redirects: str = "0"
    """Streams written to files instead of the screen, in torchrun's syntax: "3", "0:1,1:2"."""

    tee: str = "0"
    """Streams written to files and to the screen, in the same syntax."""

    shown_local_ranks: frozenset[int] | None = None
    """Local ranks whose output is shown; None: all."""

    def __post_init__(self) -> None:
        if not is_nproc(self.nproc_per_node):
            raise _refusal(
                "--nproc-per-node", self.nproc_per_node, "Give a number of ranks from 1 to 1024, or auto, gpu or cpu"
            )
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
        """True if nodes use ddpilot's own rendezvous."""
        return self.rdzv_backend == "static"

    @property
    def name(self) -> str:
        """Name of the target in messages."""
        return f"-m {self.target}" if self.kind == "module" else Path(self.target).name or self.target


def _refusal(option: str, value: object, fix: str) -> LaunchError:
    return LaunchError(f"reading {option}", found=f"{value!r}", fix=fix)
