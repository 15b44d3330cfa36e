# SPDX-License-Identifier: Apache-2.0
"""`Topology`: the rank of this process in its job, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ddpilot.errors import TopologyError

Environment = Literal["torchrun", "ddpilot", "slurm", "openmpi", "pmi", "mvapich", "alone"]
"""The launcher of this process; "pmi" is MPICH, Intel MPI or Cray, "alone" is a process that is not part of a job."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Rank, sizes and addresses of this process. Raises `TopologyError` if the numbers are inconsistent."""

    rank: int
    """0 .. `world_size` - 1, over all nodes."""
    local_rank: int
    """0 .. `local_world_size` - 1, within this node."""
    world_size: int
    """Number of ranks on all nodes, at least 1."""
    local_world_size: int
    """Number of ranks on this node, at least 1."""
    node_rank: int
    """0 .. `nnodes` - 1, rank of this node."""
    nnodes: int
    """Number of nodes, at least 1."""
    master_addr: str | None
    """Host name or address of the store. None only if "alone"."""
    master_port: int | None
    """TCP port of the store, 1 .. 65535. None only if "alone"."""
    environment: Environment
    """The launcher of this process."""
    how: str
    """One sentence with the variables and values that determined the topology."""

    def __post_init__(self) -> None:
        if self.environment not in get_args(Environment):
            raise self._refuse("environment", f"use one of {', '.join(get_args(Environment))}")
        for number, size in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "nnodes")):
            if not 0 <= getattr(self, number) < getattr(self, size):
                raise self._refuse(number, f"{number} counts from 0 and stays below {size}={getattr(self, size)}")
        self._check_sizes()
        self._check_master()

    def _check_sizes(self) -> None:
        ranks_elsewhere = self.world_size - self.local_world_size
        if ranks_elsewhere < self.nnodes - 1 or (self.nnodes == 1 and ranks_elsewhere):
            raise self._refuse(
                "local_world_size",
                f"each of the {self.nnodes} nodes has at least one of the {self.world_size} ranks, "
                "and together they have all of them",
            )

    def _check_master(self) -> None:
        if self.environment == "alone":
            if self.world_size != 1:
                raise self._refuse("world_size", "a process that is alone is a world of 1")
            return
        if not self.master_addr:
            raise self._refuse("master_addr", "give the host name or address of rank 0")
        if self.master_port is None or not 1 <= self.master_port <= 65535:
            raise self._refuse("master_port", "give a port between 1 and 65535")

    def _refuse(self, variable: str, fix: str) -> TopologyError:
        return TopologyError(
            "describing this process",
            variable=variable,
            found=f"{variable}={getattr(self, variable)!r} ({self.how})",
            fix=f"{fix[0].upper()}{fix[1:]}",
        )

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0, and if the process is not part of a job."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """True for a rank of a job, even of a job with one rank; False only for "alone"."""
        return self.environment != "alone"

    def __str__(self) -> str:
        master = "none" if self.master_addr is None else f"{self.master_addr}, port {self.master_port}"
        rows = (
            ("environment", self.environment),
            ("rank", f"{self.rank} of {self.world_size}"),
            ("local rank", f"{self.local_rank} of {self.local_world_size}"),
            ("node", f"{self.node_rank} of {self.nnodes}"),
            ("master", master),
            ("how", self.how),
        )
        return "\n".join(f"{label:<12} {value}" for label, value in rows)


def alone(how: str) -> Topology:
    """Rank 0 of 1, without a master address. `how`: the sentence that explains why."""
    return Topology(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        nnodes=1,
        master_addr=None,
        master_port=None,
        environment="alone",
        how=how,
    )
