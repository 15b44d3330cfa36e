# SPDX-License-Identifier: Apache-2.0
"""`RankStatus`: what one rank is doing at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["idle", "busy", "dead"]


@dataclass(frozen=True, kw_only=True)
class CollectiveStatus:
    """A collective or point-to-point operation that a rank has begun and that is not known to have ended."""

    op: str
    """Name of the operation in PyTorch's spelling, such as ``all_reduce``."""
    since_s: float
    """Start time on the monotonic clock."""
    site: str = ""
    """The user's line, such as ``Cell In[7]:3``; empty if not known."""
    group: str = ""
    """Name of the process group; empty for the default group."""
    seq: int | None = None
    """Sequence number in the group, from 0; None for point-to-point operations."""
    is_watched: bool = True
    """False if the backend (NCCL) does not report the end of the operation, so that it may have ended."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status of one rank. Usage is None if not known: for dead ranks, and GPU usage without a GPU."""

    rank: int
    state: State
    since_s: float
    """Time of the last change of state, on the monotonic clock."""
    pid: int | None = None
    cell: int | None = None
    """Number of the cell that it is running; None if it runs none, or something other than a cell."""
    collective: CollectiveStatus | None = None
    cpu_percent: float | None = None
    """CPU usage of the process and its children, in percent of one core: 200 is two cores."""
    memory_bytes: int | None = None
    """Memory of the process and its children; pages shared by several processes are divided between them."""
    gpu_percent: float | None = None
    """Utilization of its GPU by all processes."""
    gpu_memory_bytes: int | None = None
    reason: str = ""
    """How it died, such as ``was killed by SIGKILL``; empty if it is alive."""
