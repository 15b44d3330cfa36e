# SPDX-License-Identifier: Apache-2.0
"""Read from outside which collective a rank is in now, cheaply enough for a display that refreshes twice a second."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpilot.record.flight_ring.log import Collective, GroupOfRanks
from ddpilot.record.flight_ring.reader import read_ring

NUM_NEWEST = 64
"""Number of the rank's newest records that are read."""

_DEFAULT = "0"
"""Name of the default group."""
_FIRST = (0, 1)
"""Attempt and incarnation of a process's first default group. A session's rebuild is a new attempt."""


@dataclass(frozen=True, kw_only=True)
class GroupNow:
    """Progress of a rank in one group."""

    group: GroupOfRanks
    num_begun: int
    """Collectives that this rank has started in the group, without point-to-point operations."""
    num_ended: int
    """Collectives of `num_begun` that have finished, judged by the newest records; up to 50 ms behind."""


@dataclass(frozen=True, kw_only=True)
class RankNow:
    """State of a rank at the time of reading."""

    rank: int
    pid: int
    waiting: Collective | None
    """The newest collective that has started and was not seen to finish, since its `start_ns`; None if there is none.
    Collectives of destroyed groups, such as those before a rebuild, are ignored."""
    groups: tuple[GroupNow, ...]
    """Groups that occur in the newest records, most recently used first."""
    num_begun: int
    """Collectives and point-to-point operations since recording started."""
    heartbeat_ns: int | None
    """Time at which a Python thread of the rank last ran, on CLOCK_MONOTONIC."""
    closed_ns: int | None
    """Time at which the rank stopped recording normally; None while it runs or if it died."""


def read_now(path: str | os.PathLike[str]) -> RankNow:
    """Read the state of the rank that records into `path`. Raises as `ddpilot.record.flight_ring.reader.read_ring` does."""
    log = read_ring(path, newest=NUM_NEWEST)
    since_ns = max(log.left_ns or 0, _newest_start_ns(log.collectives))
    unfinished = [entry for entry in log.collectives if entry.state == "begun" and entry.start_ns >= since_ns]
    return RankNow(
        rank=log.rank,
        pid=log.pid,
        waiting=unfinished[-1] if unfinished else None,
        groups=tuple(_count(log.collectives)),
        num_begun=log.num_begun,
        heartbeat_ns=log.heartbeat_ns,
        closed_ns=log.closed_ns,
    )


def _newest_start_ns(collectives: Sequence[Collective]) -> int:
    """First use of the newest default group if it replaced an earlier one, whose groups are all gone; otherwise 0."""
    groups = [
        (entry.group.attempt, entry.group.incarnation, entry.start_ns)
        for entry in collectives
        if entry.group is not None
        and entry.group.name == _DEFAULT
        and (entry.group.attempt, entry.group.incarnation) > _FIRST
    ]
    newest = max((group[:2] for group in groups), default=None)
    return min((start_ns for *age, start_ns in groups if tuple(age) == newest), default=0)


def _count(collectives: Sequence[Collective]) -> Iterator[GroupNow]:
    last: dict[tuple[str, int, int], tuple[GroupOfRanks, int]] = {}
    pending: Counter[tuple[str, int, int]] = Counter()
    for entry in reversed(collectives):
        if entry.group is not None and entry.seq is not None:
            key = (entry.group.name, entry.group.attempt, entry.group.incarnation)
            last.setdefault(key, (entry.group, entry.seq))
            pending[key] += entry.state == "begun"
    for key, (group, seq) in last.items():
        yield GroupNow(group=group, num_begun=seq + 1, num_ended=seq + 1 - pending[key])
