# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a job first differ in what they do together, found by comparing what their rings hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpilot.record.agreement import Clash, find_clash
from ddpilot.record.log import Collective, GroupOfRanks, RankLog

_Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Ranks that are in different collectives under one number of a group, or in one with other arguments.

    It is proof: collectives of a group meet by their number, whatever they are.
    """

    group: GroupOfRanks
    seq: int
    """Counts the group's collectives from 0."""
    clash: Clash
    by_rank: Mapping[int, Collective]
    """What each rank called, by its rank in the job; without those that are not there yet."""
    before: Collective | None
    """The last one in common, as the lowest of these ranks called it; None where the rings no longer hold it."""


def find_difference(logs: Iterable[RankLog]) -> Difference | None:
    """The earliest difference between the ranks that `logs` are of; None where they agree as far as they have come.

    Of groups that were made anew under the same name only the newest is compared, among the ranks that have used it.
    """
    found = [difference for group in _groups_of(logs).values() if (difference := _compare(group)) is not None]
    return min(found, key=lambda difference: min(entry.start_ns for entry in difference.by_rank.values()), default=None)


def _groups_of(logs: Iterable[RankLog]) -> dict[_Key, dict[int, list[Collective]]]:
    """The collectives of the newest group of every name and set of ranks, by rank, in their order."""
    newest: dict[_Key, tuple[int, int]] = {}
    groups: dict[_Key, dict[int, list[Collective]]] = {}
    for log in logs:
        for entry in log.collectives:
            group = entry.group
            if group is None or entry.seq is None or not group.ranks:
                continue
            key, age = (group.name, group.ranks), (group.attempt, group.incarnation)
            if age > newest.get(key, (-1, -1)):
                newest[key], groups[key] = age, {}
            if age == newest[key]:
                groups[key].setdefault(log.rank, []).append(entry)
    return groups


def _compare(ranks: Mapping[int, Sequence[Collective]]) -> Difference | None:
    by_seq: dict[int, dict[int, Collective]] = {}
    for rank, entries in ranks.items():
        for entry in entries:
            by_seq.setdefault(entry.seq or 0, {})[rank] = entry
    # Where a ring has forgotten what another still holds, there is nothing to compare.
    first = max(min(entry.seq or 0 for entry in entries) for entries in ranks.values())
    before: Collective | None = None
    for seq in sorted(number for number in by_seq if number >= first):
        entries_now = by_seq[seq]
        clash = find_clash(entries_now) if len(entries_now) > 1 else None
        lowest = entries_now[min(entries_now)]
        if clash is not None and lowest.group is not None:
            return Difference(group=lowest.group, seq=seq, clash=clash, by_rank=entries_now, before=before)
        before = lowest
    return None
