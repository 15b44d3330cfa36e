# SPDX-License-Identifier: Apache-2.0
"""`Facts`: what checks read; `RankReport`: what one rank has found; `Answer`: a line of a check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpilot.environments.topology import Topology
from ddpilot.errors import DdpilotError
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding, Severity

Answer = str | Finding
"""One line of a check: what was found if it is ok, otherwise a finding."""
Answers = Iterator[Answer]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Facts about one rank, and its measurements with the other ranks. Sent as JSON."""

    rank: int
    world_size: int
    host: str
    node_rank: int = 0
    versions: dict[str, Any] = field(default_factory=dict)
    """As `ddpilot.gpu_check.child.read_facts` returns them, with `arch_list`: the GPUs this torch is compiled for."""
    code: dict[str, str] = field(default_factory=dict)
    """Hash of the script, which comes first, and of the Python files below its folder, by path; {} without a script."""
    num_threads: int = 0
    device: str = ""
    """In torch's notation: "cpu", "cuda:0"."""
    identity: str = ""
    """Equal on two ranks of a host if they share the device; "" for the CPU."""
    backend: str = ""
    joined_s: float = 0.0
    """Seconds from the call of `init_group` until all ranks had joined."""
    failure: dict[str, Any] | None = None
    """The error that ended this rank's part: `did`, `found`, `fix` and `missing` ranks."""
    wrong: tuple[str, ...] = ()
    """One sentence for each collective that returned wrong values."""
    group_times: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds) of an all_reduce, by size."""
    pair_times: tuple[tuple[int, tuple[tuple[int, float], ...]], ...] = ()
    """(other rank, ((bytes, seconds one way), by size)) for each other rank."""
    link: str = ""
    """The link between the ranks, such as "loopback" or "eth0"."""
    link_bytes_per_s: float | None = None
    """Bandwidth of the link in one direction; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Input of the checks. Files of the operating system are read below `root`."""

    environ: Mapping[str, str]
    nproc_per_node: int
    num_workers: int | None = None
    """DataLoader workers of each rank; None if not given."""
    checkpoint_dir: Path = Path()
    root: Path = Path("/")
    nvml: Any = None
    """NVIDIA's management library; None: that of the system, if there is one."""
    reach: tuple[str, ...] = ()
    """Addresses, as HOST:PORT, to which each node must be able to connect."""
    script: Path | None = None
    """With `--nodes`, the script that the job will run."""
    topology: Topology | None = None
    """With `--nodes`, the rank of this process."""
    ranks: tuple[RankReport, ...] = ()
    """Facts about each rank that has reported; empty without ranks."""
    live_failure: Finding | None = None
    """Why ranks have not reported."""

    @property
    def nnodes(self) -> int:
        """Number of nodes of the job."""
        return 1 if self.topology is None else self.topology.nnodes


def explain_error(error: DdpilotError, code: str, *, severity: Severity | None = None) -> Finding:
    """Return a finding with what `error` says, and the rest from the page of `code`."""
    missing = getattr(error, "missing", ())
    return make_finding(
        code, summary=f"{error.did}: {error.found}", fix=error.fix.rstrip("."), ranks=missing, severity=severity
    )


def in_units(num_bytes: float) -> str:
    """Return ``512 B``, ``64.0 MB`` or ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
