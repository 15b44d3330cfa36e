# SPDX-License-Identifier: Apache-2.0
"""Read the status of every rank from its kernel's state, its flight ring and its process."""

from __future__ import annotations

import time

from ddpilot.errors import RecordError
from ddpilot.record.flight_ring.current import read_now
from ddpilot.record.hook import ring_path
from ddpilot.session.board.usage import Usage, collect_usage
from ddpilot.session.kernels.manager import Ranks
from ddpilot.session.status import CollectiveStatus, RankStatus, State


def read_statuses(ranks: Ranks) -> tuple[RankStatus, ...]:
    """Return the status of every rank, in rank order. Takes a tenth of a second, in which CPU usage is measured."""
    pids = {rank: pid for rank in ranks.standing.live if (pid := ranks.host.pid(rank)) is not None}
    usage = collect_usage(pids.values())
    return tuple(_status(ranks, rank, pids.get(rank), usage) for rank in range(ranks.world_size))


def _status(ranks: Ranks, rank: int, pid: int | None, usage: dict[int, Usage]) -> RankStatus:
    reason, running = ranks.standing.dead.get(rank), ranks.standing.busy.get(rank)
    idle_since_s = ranks.standing.since_s.get(rank, time.monotonic())
    state: State = "dead" if reason is not None else "busy" if running is not None else "idle"
    uses = None if pid is None else usage.get(pid)
    return RankStatus(
        rank=rank,
        state=state,
        since_s=running[1] if state == "busy" and running is not None else idle_since_s,
        pid=pid,
        cell=running[0] if running is not None else None,
        collective=None if reason is not None else _collective(ranks, rank),
        cpu_percent=None if uses is None else uses.cpu_percent,
        memory_bytes=None if uses is None else uses.memory_bytes,
        gpu_percent=None if uses is None else uses.gpu_percent,
        gpu_memory_bytes=None if uses is None else uses.gpu_memory_bytes,
        reason=reason or "",
    )


def _collective(ranks: Ranks, rank: int) -> CollectiveStatus | None:
    try:
        entry = read_now(ring_path(ranks.ring_folder, rank)).waiting
    except (RecordError, OSError):  # no ring: the status has no collective
        return None
    if entry is None:
        return None
    is_default = entry.group is None or entry.group.description in ("default_pg", "") or entry.group.size == 0
    return CollectiveStatus(
        op=entry.op,
        since_s=entry.start_ns / 1e9,
        site=entry.line.place if entry.line is not None else "",
        group="" if is_default or entry.group is None else entry.group.description or entry.group.name,
        seq=entry.seq,
        is_watched=entry.is_watched,
    )
