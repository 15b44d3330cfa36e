# SPDX-License-Identifier: Apache-2.0
"""Find how far the ranks of each group have progressed, and collectives that only some of them have begun."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ddpilot.record.flight_ring.log import Collective, GroupOfRanks, RankLog
from ddpilot.watch.snapshot.model import JobSnapshot

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


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompleteCollective(GroupCollective):
    """A collective that some ranks of its group have not begun, or that has not completed."""

    missing: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    """Ranks whose progress cannot be seen."""


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


def find_incomplete(job: JobSnapshot, progress: Iterable[GroupProgress]) -> Iterator[IncompleteCollective]:
    """Yield, for each group in which some ranks are ahead of others, the first collective that these wait in."""
    for each in progress:
        incomplete = _find_incomplete_in(job, each)
        if incomplete is not None and incomplete.newest_ns >= job.since_ns:
            yield incomplete


def _find_incomplete_in(job: JobSnapshot, progress: GroupProgress) -> IncompleteCollective | None:
    newest = max(progress.position(rank) for rank in progress.by_rank)
    behind = {rank: progress.position(rank) for rank in progress.group.ranks}
    unknown = {rank for rank in progress.group.ranks if _may_be_ahead(job, progress, rank)}
    lowest = min((at for rank, at in behind.items() if rank not in unknown), default=newest)
    missing: tuple[int, ...] = ()
    seq = newest  # all ranks whose progress can be seen have begun it
    if lowest < newest:
        missing = tuple(rank for rank, at in behind.items() if at == lowest and rank not in unknown)
        seq = lowest + 1
    by_rank = _collectives_at(progress, seq)
    # A broadcast may complete on its root without the other ranks: the root waits in a later collective.
    while lowest < newest and by_rank and all(each.state == "done" for each in by_rank.values()):
        later = _collectives_at(progress, seq + 1)
        if not later:
            break
        seq, by_rank = seq + 1, later
    if not by_rank:
        return None
    unseen = tuple(sorted(unknown - by_rank.keys()))
    return IncompleteCollective(progress=progress, seq=seq, by_rank=by_rank, missing=missing, unknown=unseen)


def _collectives_at(progress: GroupProgress, seq: int) -> dict[int, Collective]:
    return {rank: entry for rank in progress.by_rank if (entry := progress.at(rank, seq)) is not None}


def _may_be_ahead(job: JobSnapshot, progress: GroupProgress, rank: int) -> bool:
    """True if `rank` may have begun more collectives in this group than can be seen."""
    if rank in progress.by_rank:
        return False
    seen = job.ranks.get(rank)
    if seen is None:
        return True
    if seen.log is None:
        return seen.process.state != "ended" and not seen.returned and seen.error is None
    entries = seen.log.collectives
    first_ns = min(entries[0].start_ns for entries in progress.by_rank.values())
    return bool(entries) and entries[0].index > 1 and entries[0].start_ns > first_ns
