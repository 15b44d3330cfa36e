# SPDX-License-Identifier: Apache-2.0
"""What a rank of a session is doing at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["starting", "idle", "busy", "dead"]


@dataclass(frozen=True, kw_only=True)
class CollectiveStatus:
    """A collective, or point-to-point operation, that a rank has begun and that was not seen to be over."""

    op: str
    """In PyTorch's spelling, such as ``all_reduce``."""
    since_s: float
    """When it began, on the monotonic clock."""
    site: str = ""
    """The user's line, such as ``Cell In[7]:3``; empty where it is not known."""
    group: str = ""
    """Name of the process group; empty for the default one."""
    seq: int | None = None
    """Counts the group's collectives from 0; None for point-to-point."""
    is_watched: bool = True
    """False where the backend (NCCL) does not tell when it is over: then it may be."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank. Usage is None where it is not known: of a dead rank, and of a GPU where there is none."""

    rank: int
    state: State
    since_s: float
    """When it came into this state, on the monotonic clock."""
    pid: int | None = None
    cell: int | None = None
    """Number of the cell that it runs; None where it runs none, or does something else than a cell."""
    collective: CollectiveStatus | None = None
    cpu_percent: float | None = None
    """Of one core, its child processes included: 200 is two cores."""
    memory_bytes: int | None = None
    """Its own share: pages that several ranks have in common count once between them."""
    gpu_percent: float | None = None
    """Of the device that it uses, whoever else uses it."""
    gpu_memory_bytes: int | None = None
    reason: str = ""
    """Of what it died, such as ``was killed by SIGKILL``."""
