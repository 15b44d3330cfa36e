# SPDX-License-Identifier: Apache-2.0
"""Find how far the ranks of each group have progressed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ddpilot.record.flight_ring.log import Collective, GroupOfRanks, RankLog

_NameAndRanks = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class GroupProgress:
    """The collectives that the ranks of one group have begun in it, in order."""

    group: GroupOfRanks
    by_rank: dict[int, list[Collective]] = field(default_factory=dict)

    def at(self, rank: int, seq: int) -> Collective | None:
        """Return the collective with number `seq` of `rank`; None if it is unknown."""
        entries = self.by_rank.get(rank, [])
        found = bisect_left(entries, seq, key=_seq_of)
        return entries[found] if found < len(entries) and entries[found].seq == seq else None

    def all_at(self, seq: int) -> dict[int, Collective]:
        """Return the collective with number `seq` of each rank that is known to have begun it."""
        return {rank: entry for rank in sorted(self.by_rank) if (entry := self.at(rank, seq)) is not None}

    def last(self, rank: int) -> Collective | None:
        """Return the newest collective of `rank`; None if it began none."""
        entries = self.by_rank.get(rank)
        return entries[-1] if entries else None

    def position(self, rank: int) -> int:
        """Return the number of the newest collective of `rank`; -1 if it began none."""
        last = self.last(rank)
        return _seq_of(last) if last is not None else -1

    @property
    def first_common(self) -> int:
        """The lowest number that the logs of all ranks that used the group still hold."""
        return max(_seq_of(entries[0]) for entries in self.by_rank.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCollective:
    """One collective of a group, by the ranks that have begun it."""

    progress: GroupProgress
    seq: int
    by_rank: Mapping[int, Collective]

    @property
    def since_ns(self) -> int:
        """When the first of the ranks began it."""
        return min(entry.start_ns for entry in self.by_rank.values())

    @property
    def newest_ns(self) -> int:
        """When the last of the ranks began it."""
        return max(entry.start_ns for entry in self.by_rank.values())


def _seq_of(entry: Collective) -> int:
    return -1 if entry.seq is None else entry.seq


def find_progress(logs: Iterable[RankLog]) -> list[GroupProgress]:
    """Return the progress in the newest group of every name and set of ranks."""
    groups: dict[_NameAndRanks, GroupProgress] = {}
    for log in logs:
        known: dict[int, list[Collective] | None] = {}  # one lookup per group: it may have thousands of ranks
        for entry in log.collectives:
            if entry.group is None or entry.seq is None:
                continue
            number = id(entry.group)
            if number not in known:
                known[number] = _find_entries(entry.group, log.rank, groups)
            entries = known[number]
            if entries is not None:
                entries.append(entry)
    return list(groups.values())


def _find_entries(
    group: GroupOfRanks, rank: int, groups: dict[_NameAndRanks, GroupProgress]
) -> list[Collective] | None:
    """Return the list for the collectives of `rank` in `group`; None if a newer group has replaced the group."""
    if not group.ranks:
        return None
    key = (group.name, group.ranks)
    known = groups.get(key)
    if known is None or group.generation > known.group.generation:
        known = groups[key] = GroupProgress(group)
    return known.by_rank.setdefault(rank, []) if group.generation == known.group.generation else None
