# SPDX-License-Identifier: Apache-2.0
"""What a rank is in at this moment, read from outside, cheaply enough for a board that looks twice a second."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpilot.record.log import Collective, GroupOfRanks
from ddpilot.record.reading import read_ring

NUM_NEWEST = 64
"""How many of the rank's newest records are looked at."""

_DEFAULT = "0"
"""The name of the default group."""


@dataclass(frozen=True, kw_only=True)
class GroupNow:
    """How far a rank is in one group."""

    group: GroupOfRanks
    num_begun: int
    """Collectives that this rank has begun in it; point-to-point is not counted."""
    num_ended: int
    """Those of them that are over, as far as the newest records tell; seen up to 50 ms after the fact."""


@dataclass(frozen=True, kw_only=True)
class RankNow:
    """What a rank is in now."""

    rank: int
    pid: int
    waiting: Collective | None
    """The last one that began and was not seen to be over; its `start_ns` says since when. None if there is none; those
    of groups that were destroyed, as by a rebuild, do not count."""
    groups: tuple[GroupNow, ...]
    """Of the groups that the newest records are of, the one used last first."""
    num_begun: int
    """Collectives and point-to-point operations since the recording began."""
    heartbeat_ns: int | None
    """When a Python thread of the rank last ran, on CLOCK_MONOTONIC."""
    closed_ns: int | None
    """When the rank stopped recording in an orderly way; None while it runs, and where it died."""


def read_now(path: str | os.PathLike[str]) -> RankNow:
    """What the rank that records there is in now. Raises as `ddpilot.record.reading.read_ring` does."""
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
    """When the newest default group was used first, if there was one before it: with that all its groups are gone."""
    groups = [
        (entry.group.attempt, entry.group.incarnation, entry.start_ns)
        for entry in collectives
        if entry.group is not None and entry.group.name == _DEFAULT and entry.group.incarnation > 1
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
