# SPDX-License-Identifier: Apache-2.0
"""Match sends with receives, and explain messages whose sizes differ between the two sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring.log import Collective
from ddpilot.watch.explain.text import describe, lay_out, peer_of, place_of, say_place
from ddpilot.watch.snapshot.model import JobView, RankView

_Channel = tuple[int, int, int | None, str]
"""Sender, receiver, tag and group key: messages of one channel arrive in order."""


_WITH_TAGS = ("mpi", "ucc")
"""Backends with tags besides gloo, which is recognized by `is_watched`."""


@dataclass(frozen=True, slots=True)
class Message:
    """A send and the receive that matches it."""

    sender: int
    sent: Collective
    receiver: int
    received: Collective


def find_lone_messages(view: JobView) -> dict[tuple[int, int], bool]:
    """Return by (rank, index of the entry) True if a send or receive has no matching call.

    Messages of one channel arrive in order and are matched by counting. Ranks whose logs have dropped entries, or that
    receive from any source, are excluded.
    """
    ways: dict[_Channel, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    known = {rank for rank, seen in view.ranks.items() if _counts(seen)}
    for rank in known:
        for entry in _messages(view.ranks[rank]):
            peer = peer_of(entry)
            if peer in known and peer is not None:
                is_sent = entry.op == "send"
                way = (rank, peer) if is_sent else (peer, rank)
                sides = ways.setdefault((*way, tag_of(entry), group_key(entry)), ([], []))
                sides[0 if is_sent else 1].append((rank, entry.index))
    found: dict[tuple[int, int], bool] = {}
    for sent, received in ways.values():
        for mine, theirs in ((sent, received), (received, sent)):
            found |= {key: number >= len(theirs) for number, key in enumerate(mine)}
    return found


def _counts(rank: RankView) -> bool:
    entries = rank.log.collectives if rank.log is not None else ()
    is_whole = not entries or entries[-1].index == len(entries)
    return is_whole and not any(entry.is_p2p and entry.peer is None for entry in entries)


def find_unequal_messages(view: JobView) -> Iterator[Message]:
    """Yield the first message of each channel whose sizes differ; excludes ranks whose logs have dropped entries."""
    sent: dict[_Channel, list[Collective]] = {}
    received: dict[_Channel, list[Collective]] = {}
    for rank, seen in view.ranks.items():
        for entry in _messages(seen):
            peer = peer_of(entry)
            if peer is None:  # a receive from any source may have taken a message of a different channel
                received = {way: entries for way, entries in received.items() if way[1] != rank}
                break
            if entry.op == "send":
                sent.setdefault((rank, peer, tag_of(entry), group_key(entry)), []).append(entry)
            else:
                received.setdefault((peer, rank, tag_of(entry), group_key(entry)), []).append(entry)
    for way, entries in received.items():
        for mine, theirs in zip(entries, sent.get(way, ()), strict=False):
            if mine.num_bytes != theirs.num_bytes:
                yield Message(way[0], theirs, way[1], mine)
                break


def _messages(rank: RankView) -> list[Collective]:
    entries = rank.log.collectives if rank.log is not None else ()
    if not entries or entries[-1].index != len(entries):  # a dropped entry would shift all later matches
        return []
    return [entry for entry in entries if entry.is_p2p]


def group_key(entry: Collective) -> str:
    """Return a key of the group of `entry`, distinct from earlier groups of the same name (rebuilds, attempts)."""
    group = entry.group
    return f"{group.name}/{group.attempt}/{group.incarnation}" if group is not None else ""


def tag_of(entry: Collective) -> int | None:
    """Return the tag by which `entry` is matched; None if its backend matches by order alone, as NCCL does."""
    backend = entry.group.backend if entry.group is not None else ""
    return entry.tag if entry.is_watched or any(name in backend for name in _WITH_TAGS) else None


def explain_message(view: JobView, message: Message) -> Finding:
    """Return the finding for `message`, with the lines of both sides."""
    sides = ((message.sender, message.sent), (message.receiver, message.received))
    rows = [(f"rank {rank}", describe(entry) + _fate(view.ranks[rank]), say_place(entry.line)) for rank, entry in sides]
    gives, takes = f"{message.sent.num_bytes:,} bytes", f"{message.received.num_bytes:,}"
    return make_finding(
        "DDP202",
        # Over gloo, some programs allocate larger buffers on purpose, for messages of any size.
        severity="error" if message.sent.num_bytes > message.received.num_bytes else "warning",
        summary=f"rank {message.sender} sends {gives} to rank {message.receiver}, which has room for {takes}",
        ranks=(message.sender, message.receiver),
        line=place_of(message.received.line),
        evidence=lay_out(rows),
        why="gloo ends the process that has too little room, and leaves the rest as it was where there is too much",
        fix="give send and recv tensors of one size and dtype; where it varies, send the size before",
    )


def _fate(rank: RankView) -> str:
    return f", died of {rank.process.signal_name}" if rank.process.signal_name else ""
