# SPDX-License-Identifier: Apache-2.0
"""Find which ranks wait for which: in collectives, in sends and receives, and in cycles of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from ddpilot.module_names import WAIT_FOR_PEERS
from ddpilot.record.flight_ring.log import Collective
from ddpilot.watch.matching.outcomes import RankOutcome, is_blocked_by
from ddpilot.watch.matching.progress import GroupCollective, GroupProgress
from ddpilot.watch.snapshot.model import JobSnapshot
from ddpilot.watch.snapshot.stacks import passes

_ERROR_NS = 1_500_000_000
"""A rank may destroy its groups in a `finally` because of an error; by then the error is known."""
_CUT_OFF_NS = 200_000_000
"""The same for a rank whose peers have lost their connection to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Ranks that cannot continue without others, in a collective or in one point-to-point operation."""

    held: Mapping[int, Collective]
    missing: tuple[int, ...]
    unknown: tuple[int, ...] = ()
    collective: GroupCollective | None = None
    """None for a point-to-point operation."""

    @property
    def since_ns(self) -> int:
        """When the wait began: with the first waiting rank if ranks are missing or unknown, else with the last rank."""
        if self.collective is not None and not (self.missing or self.unknown):
            return self.collective.newest_ns
        return min(entry.start_ns for entry in self.held.values())


def find_waits(
    job: JobSnapshot, outcomes: Mapping[int, RankOutcome], progress: Iterable[GroupProgress]
) -> tuple[list[Wait], dict[int, tuple[int, ...]]]:
    """Return every wait of ranks that are alive, or that were waiting when they ended.

    Also returns the ranks for which only a stack can show whether they wait, with the ranks that they would wait for.
    """
    waits: list[Wait] = []
    needs: dict[int, tuple[int, ...]] = {}
    for each in progress:
        wait = _find_incomplete(job, each)
        if wait is None or wait.collective is None or wait.collective.newest_ns < job.since_ns:
            continue
        held = {
            rank: entry
            for rank, entry in wait.held.items()
            if _is_held(job, outcomes[rank], rank, entry, needs, wait.missing)
        }
        if held:
            waits.append(replace(wait, held=held))
    return [*waits, *_find_p2p(job, outcomes, needs)], needs


def _find_incomplete(job: JobSnapshot, progress: GroupProgress) -> Wait | None:
    """Return the first collective that some ranks of the group have not begun, or that has not completed."""
    newest = max(progress.position(rank) for rank in progress.by_rank)
    behind = {rank: progress.position(rank) for rank in progress.group.ranks}
    unknown = {rank for rank in progress.group.ranks if _may_be_ahead(job, progress, rank)}
    lowest = min((at for rank, at in behind.items() if rank not in unknown), default=newest)
    missing: tuple[int, ...] = ()
    seq = newest  # all ranks whose progress can be seen have begun it
    if lowest < newest:
        missing = tuple(rank for rank, at in behind.items() if at == lowest and rank not in unknown)
        seq = lowest + 1
    by_rank = progress.all_at(seq)
    # A broadcast may complete on its root without the other ranks: the root waits in a later collective.
    while lowest < newest and by_rank and all(each.state == "done" for each in by_rank.values()):
        later = progress.all_at(seq + 1)
        if not later:
            break
        seq, by_rank = seq + 1, later
    if not by_rank:
        return None
    collective = GroupCollective(progress=progress, seq=seq, by_rank=by_rank)
    return Wait(by_rank, missing, tuple(sorted(unknown - by_rank.keys())), collective)


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


def _is_held(
    job: JobSnapshot,
    outcome: RankOutcome,
    rank: int,
    entry: Collective,
    needs: dict[int, tuple[int, ...]],
    missing: tuple[int, ...],
) -> bool:
    answer = is_blocked_by(job.ranks[rank], outcome, entry)
    if answer is None:
        needs[rank] = missing
    return bool(answer)


def outcome_in(job: JobSnapshot, outcomes: Mapping[int, RankOutcome], wait: Wait, rank: int) -> RankOutcome:
    """Return the state of `rank` with regard to the group of `wait`: "finished" for a live rank that has left it."""
    seen, outcome = job.ranks.get(rank), outcomes[rank]
    if seen is None or seen.log is None or outcome.state != "alive":
        return outcome
    if wait.collective is not None:
        last = wait.collective.progress.last(rank)
    else:
        groups = {entry.group.key for entry in wait.held.values() if entry.group is not None}
        entries = reversed(seen.collectives)
        last = next((entry for entry in entries if entry.group is not None and entry.group.key in groups), None)
    # If other ranks have lost their connection to it, the reason for leaving does not matter.
    is_cut_off = any(outcomes[each].state == "victim" for each in wait.held) and not seen.has_closed_log
    left_ns, patience_ns = seen.log.left_ns, _CUT_OFF_NS if is_cut_off else _ERROR_NS
    if left_ns is not None and last is not None and last.start_ns < left_ns and job.now_ns - left_ns > patience_ns:
        words = "has reached its end" if seen.has_closed_log else "has destroyed its process groups"
        return RankOutcome("finished", words)
    return RankOutcome("finished", "leaves its group") if passes(seen.stack, WAIT_FOR_PEERS) is not None else outcome


def _find_p2p(
    job: JobSnapshot, outcomes: Mapping[int, RankOutcome], needs: dict[int, tuple[int, ...]]
) -> Iterator[Wait]:
    is_unmatched = find_unmatched_messages(job)
    pending = {rank: list(_pending_p2p(job, rank, outcomes[rank], is_unmatched)) for rank in job.ranks}
    newest = _newest_groups(job) if any(pending.values()) else {}
    pending = {rank: [each for each in entries if _is_newest(each, newest)] for rank, entries in pending.items()}
    offered = {
        (rank, peer_of(entry), entry.op == "send", tag_of(entry), _local_key(entry))
        for rank, entries in pending.items()
        for entry in (*entries, *filter(_has_unknown_end, job.ranks[rank].collectives))
    }
    for rank, entries in pending.items():
        for entry in entries:
            peer = peer_of(entry)
            other = (peer, rank, entry.op != "send", tag_of(entry), _local_key(entry))
            is_offered = other in offered or (peer, None, False, tag_of(entry), _local_key(entry)) in offered
            if peer is None or (is_offered and not _has_unknown_end(entry)):
                continue  # the matching call exists: the message is in transit
            if entry.start_ns >= job.since_ns and _is_held(job, outcomes[rank], rank, entry, needs, (peer,)):
                yield Wait({rank: entry}, (peer,))
                break


def _pending_p2p(
    job: JobSnapshot, rank: int, outcome: RankOutcome, is_unmatched: Mapping[tuple[int, int], bool]
) -> Iterator[Collective]:
    entries = job.ranks[rank].collectives
    newest = {entry.index for entry in takewhile(_has_unknown_end, reversed(entries))}
    for entry in entries:
        if not entry.is_p2p:
            continue
        unmatched = is_unmatched.get((rank, entry.index))
        # A call that failed after it started looks done: the rank was ended by its newest, or by an unmatched one.
        is_end = outcome.state == "victim" and (unmatched or (unmatched is None and entry is entries[-1]))
        is_open = entry.state in ("begun", "failed") and unmatched is not False
        # If several are executed as one, as with NCCL, only counting proves that one of them has no match.
        if is_end or is_open or (unmatched and entry.index in newest):
            yield entry


def _has_unknown_end(entry: Collective) -> bool:
    return entry.is_p2p and entry.state == "unknown"


def _newest_groups(job: JobSnapshot) -> dict[tuple[str, tuple[int, ...]], tuple[int, int]]:
    """Return the newest generation of each group that any rank has used, by name and ranks."""
    entries = (entry for seen in job.ranks.values() for entry in seen.collectives)
    groups = {id(entry.group): entry.group for entry in entries if entry.group is not None}
    newest: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for group in groups.values():
        key = (group.name, group.ranks)
        newest[key] = max(newest.get(key, (0, 0)), group.generation)
    return newest


def _is_newest(entry: Collective, newest: Mapping[tuple[str, tuple[int, ...]], tuple[int, int]]) -> bool:
    return entry.group is None or entry.group.generation == newest[entry.group.name, entry.group.ranks]


def find_cycles(waits: Iterable[Wait]) -> list[list[Wait]]:
    """Return cycles of waits: each wait needs a rank that the next one holds, and the last needs one of the first."""
    every = list(waits)
    holders: dict[int, list[Wait]] = {}
    for wait in every:
        for rank in wait.held:
            holders.setdefault(rank, []).append(wait)
    cycles: list[list[Wait]] = []
    done: set[int] = set()
    for wait in every:
        cycles += _walk(wait, holders, done)
    return cycles


def _walk(start: Wait, holders: Mapping[int, list[Wait]], done: set[int]) -> Iterator[list[Wait]]:
    """Yield the cycles reachable from `start`. Each wait is visited once and then added to `done`."""
    if id(start) in done:
        return
    path, pending = [start], [iter(_next(start, holders))]
    while path:
        following = next(pending[-1], None)
        if following is None:
            done.add(id(path.pop()))
            pending.pop()
        elif following in path:
            yield path[path.index(following) :]
        elif id(following) not in done:
            path.append(following)
            pending.append(iter(_next(following, holders)))


def _next(wait: Wait, holders: Mapping[int, list[Wait]]) -> list[Wait]:
    return list({id(each): each for rank in wait.missing for each in holders.get(rank, ())}.values())


_LocalKey = tuple[str, int, int] | None
_Channel = tuple[int, int, int | None, _LocalKey]
"""Sender, receiver, tag and group: messages of one channel arrive in order."""


_WITH_TAGS = ("mpi", "ucc")
"""Backends with tags besides gloo, which is recognized by `is_watched`."""


@dataclass(frozen=True, slots=True)
class Message:
    """A send and the receive that matches it."""

    sender: int
    sent: Collective
    receiver: int
    received: Collective


def find_unmatched_messages(job: JobSnapshot) -> dict[tuple[int, int], bool]:
    """Return by (rank, index of the entry) True if a send or receive has no matching call, False if it has one."""
    found: dict[tuple[int, int], bool] = {}
    for (sender, receiver, *_), (sent, received) in _find_channels(job).items():
        for rank, mine, theirs in ((sender, sent, received), (receiver, received, sent)):
            found |= {(rank, entry.index): number >= len(theirs) for number, entry in enumerate(mine)}
    return found


def find_unequal_messages(job: JobSnapshot) -> Iterator[Message]:
    """Yield the first message of each channel whose sizes differ."""
    for (sender, receiver, *_), (sent, received) in _find_channels(job).items():
        pairs = zip(sent, received, strict=False)
        pair = next(((mine, theirs) for mine, theirs in pairs if mine.num_bytes != theirs.num_bytes), None)
        if pair is not None:
            yield Message(sender, pair[0], receiver, pair[1])


def _find_channels(job: JobSnapshot) -> dict[_Channel, tuple[list[Collective], list[Collective]]]:
    """Return the sends and the receives of each channel, in order: the n-th send matches the n-th receive.

    Excludes ranks whose logs have dropped entries, and channels to ranks that receive from any source.
    """
    messages = {
        rank: [entry for entry in seen.collectives if entry.is_p2p]
        for rank, seen in job.ranks.items()
        if not seen.collectives or seen.collectives[-1].index == len(seen.collectives)
    }
    from_any = {rank for rank, each in messages.items() if any(entry.peer is None for entry in each)}
    channels: dict[_Channel, tuple[list[Collective], list[Collective]]] = {}
    for rank, each in messages.items():
        for entry in each:
            peer, is_sent = peer_of(entry), entry.op == "send"
            if peer is None or peer not in messages or (peer if is_sent else rank) in from_any:
                continue
            ends = (rank, peer) if is_sent else (peer, rank)
            channel = channels.setdefault((*ends, tag_of(entry), _local_key(entry)), ([], []))
            channel[0 if is_sent else 1].append(entry)
    return channels


def _local_key(entry: Collective) -> _LocalKey:
    return entry.group.local_key if entry.group is not None else None


def tag_of(entry: Collective) -> int | None:
    """Return the tag by which `entry` is matched; None if its backend matches by order alone, as NCCL does."""
    backend = entry.group.backend if entry.group is not None else ""
    return entry.tag if entry.is_watched or any(name in backend for name in _WITH_TAGS) else None


def peer_of(entry: Collective) -> int | None:
    """Return the peer's rank in the job of a point-to-point operation; None for a receive from any source."""
    return None if entry.peer is None else rank_in_job(entry, entry.peer)


def rank_in_job(entry: Collective, number: int) -> int:
    """Return the rank in the job of rank `number` of the group; `number` if the group's ranks are unknown."""
    ranks = entry.group.ranks if entry.group is not None else ()
    return ranks[number] if 0 <= number < len(ranks) else number
