# SPDX-License-Identifier: Apache-2.0
"""Find which ranks wait for which: in collectives, in sends and receives, and in cycles of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ddpilot.record.flight_ring.log import Collective
from ddpilot.watch.explain.text import peer_of
from ddpilot.watch.matching.messages import find_lone_messages, group_key, tag_of
from ddpilot.watch.matching.outcomes import Fate, holds_up
from ddpilot.watch.matching.progress import GroupKey, Meeting
from ddpilot.watch.snapshot.model import JobView


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Ranks that cannot continue without others, in a collective or in one point-to-point operation."""

    held: Mapping[int, Collective]
    missing: tuple[int, ...]
    unknown: tuple[int, ...] = ()
    meeting: Meeting | None = None
    """None for a point-to-point operation."""

    @property
    def since_ns(self) -> int:
        """When the wait began: for ranks that have not come, with the first that waits; after that, with the last."""
        if self.meeting is not None and not (self.missing or self.unknown):
            return self.meeting.newest_ns
        return min(entry.start_ns for entry in self.held.values())


@dataclass(slots=True)
class Waits:
    """All waits of a job."""

    waits: list[Wait] = field(default_factory=list)
    needs_stacks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Ranks for which only a stack can show whether they wait, with the ranks that they would wait for."""


def find_waits(view: JobView, fates: Mapping[int, Fate], meetings: Iterable[Meeting]) -> Waits:
    """Return every wait of ranks that are alive, or that were waiting when they ended."""
    found = Waits()
    for meeting in meetings:
        held = {
            rank: entry
            for rank, entry in meeting.arrived.items()
            if _is_held(view, fates[rank], rank, entry, found, meeting.missing)
        }
        if held:
            found.waits.append(Wait(held, meeting.missing, meeting.unknown, meeting))
    found.waits += _find_p2p(view, fates, found)
    return found


def _is_held(view: JobView, fate: Fate, rank: int, entry: Collective, found: Waits, missing: tuple[int, ...]) -> bool:
    answer = holds_up(view.ranks[rank], fate, entry)
    if answer is None:
        found.needs_stacks[rank] = missing
    return bool(answer)


def _find_p2p(view: JobView, fates: Mapping[int, Fate], found: Waits) -> Iterator[Wait]:
    is_lone = find_lone_messages(view)
    pending = {rank: list(_pending_p2p(view, rank, fates[rank], is_lone)) for rank in view.ranks}
    newest = _newest_groups(view) if any(pending.values()) else {}
    pending = {rank: [each for each in entries if _is_newest(each, newest)] for rank, entries in pending.items()}
    offered = {
        (rank, peer_of(entry), entry.op == "send", tag_of(entry), group_key(entry))
        for rank, entries in pending.items()
        for entry in (*entries, *filter(_has_unknown_end, _entries_of(view, rank)))
    }
    for rank, entries in pending.items():
        for entry in entries:
            peer = peer_of(entry)
            other = (peer, rank, entry.op != "send", tag_of(entry), group_key(entry))
            is_offered = other in offered or (peer, None, False, tag_of(entry), group_key(entry)) in offered
            if peer is None or (is_offered and not _has_unknown_end(entry)):
                continue  # the matching call exists: the message is in transit
            if entry.start_ns >= view.since_ns and _is_held(view, fates[rank], rank, entry, found, (peer,)):
                yield Wait({rank: entry}, (peer,))
                break


def _pending_p2p(view: JobView, rank: int, fate: Fate, is_lone: Mapping[tuple[int, int], bool]) -> Iterator[Collective]:
    entries = _entries_of(view, rank)
    newest = {entry.index for entry in takewhile(_has_unknown_end, reversed(entries))}
    for entry in entries:
        if not entry.is_p2p:
            continue
        lone = is_lone.get((rank, entry.index))
        # A call that failed after it started looks done: the rank was ended by its newest, or by an unmatched one.
        is_end = fate.state == "victim" and (lone or (lone is None and entry is entries[-1]))
        is_open = entry.state in ("begun", "failed") and lone is not False
        # If several are executed as one, as with NCCL, only counting proves that one of them has no match.
        if is_end or is_open or (lone and entry.index in newest):
            yield entry


def _entries_of(view: JobView, rank: int) -> Sequence[Collective]:
    log = view.ranks[rank].log
    return log.collectives if log is not None else ()


def _has_unknown_end(entry: Collective) -> bool:
    return entry.is_p2p and entry.state == "unknown"


def _newest_groups(view: JobView) -> dict[GroupKey, tuple[int, int]]:
    """Return the newest group that any rank has used, by name and ranks; earlier ones have been destroyed."""
    logs = [seen.log for seen in view.ranks.values() if seen.log is not None]
    groups = {id(entry.group): entry.group for log in logs for entry in log.collectives if entry.group is not None}
    newest: dict[GroupKey, tuple[int, int]] = {}
    for group in groups.values():
        key = (group.name, group.ranks)
        newest[key] = max(newest.get(key, (0, 0)), (group.attempt, group.incarnation))
    return newest


def _is_newest(entry: Collective, newest: Mapping[GroupKey, tuple[int, int]]) -> bool:
    group = entry.group
    return group is None or (group.attempt, group.incarnation) == newest[group.name, group.ranks]


def find_circles(waits: Iterable[Wait]) -> list[list[Wait]]:
    """Return cycles of waits: each wait needs a rank that the next one holds, and the last needs one of the first."""
    every = list(waits)
    holders: dict[int, list[Wait]] = {}
    for wait in every:
        for rank in wait.held:
            holders.setdefault(rank, []).append(wait)
    circles: list[list[Wait]] = []
    done: set[int] = set()
    for wait in every:
        circles += _walk(wait, holders, done)
    return circles


def _walk(start: Wait, holders: Mapping[int, list[Wait]], done: set[int]) -> Iterator[list[Wait]]:
    """Yield the cycles reachable from `start`. Each wait is visited once and then added to `done`."""
    if id(start) in done:
        return
    path, ways = [start], [iter(_next(start, holders))]
    while path:
        following = next(ways[-1], None)
        if following is None:
            done.add(id(path.pop()))
            ways.pop()
        elif following in path:
            yield path[path.index(following) :]
        elif id(following) not in done:
            path.append(following)
            ways.append(iter(_next(following, holders)))


def _next(wait: Wait, holders: Mapping[int, list[Wait]]) -> list[Wait]:
    return list({id(each): each for rank in wait.missing for each in holders.get(rank, ())}.values())
