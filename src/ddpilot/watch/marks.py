# SPDX-License-Identifier: Apache-2.0
"""Checksums of the collectives of each group, by which nodes detect differences while no rank waits.

Ranks with different reduce-ops do not wait for each other, so that nothing else would show the difference.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from ddpilot.record.agreement import terms_of
from ddpilot.record.log import Collective, RankLog
from ddpilot.watch.rings import Key, key_of

_SETTLED_NS = 1_000_000_000
"""The reduce-op of a collective has been written after this time."""

_NUM_LEVELS = 11
_WINDOW = 1 << (_NUM_LEVELS - 1)
"""The checksum is reset after this many collectives: an unreadable one invalidates it up to the next reset."""

_MAX_GROUPS = 64
_MAX_SAID = 4
"""Number of groups whose marks are sent to the other nodes, with every pulse."""


@dataclass(slots=True)
class _Chain:
    """Checksums over the collectives of one group, as one of its ranks began them."""

    rank: int
    next_seq: int = 0
    checksum: int = 0
    is_whole: bool = True
    marks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By level: the newest number of collectives that is divisible by 2**level, and the checksum at that point.
    Nodes that are at different points still share the numbers of a high level.
    """

    def add(self, entry: Collective, seq: int) -> None:
        if seq % _WINDOW == 0:
            self.checksum, self.is_whole = 0, True
        elif seq != self.next_seq:
            self.is_whole = False
        self.next_seq = count = seq + 1
        if self.is_whole:
            said = repr((terms_of(entry), entry.root, entry.reduce_op))
            self.checksum = zlib.crc32(said.encode(), self.checksum)
            for level in range(min(_NUM_LEVELS, (count & -count).bit_length())):
                self.marks[level] = (count, self.checksum)


class Marks:
    """Checksums for one node: one rank per group is enough, since the ranks of a node are compared elsewhere."""

    def __init__(self) -> None:
        self._chains: dict[Key, _Chain] = {}
        self._done: dict[int, int] = {}

    def feed(self, logs: Iterable[RankLog], now_ns: int) -> None:
        """Add collectives of `logs` that are new and old enough for their reduce-op to be known."""
        for log in logs:
            entries = log.collectives
            first = bisect_right(entries, self._done.get(log.rank, 0), key=lambda entry: entry.index)
            for entry in entries[first:]:
                if now_ns - entry.start_ns < _SETTLED_NS:
                    break
                self._done[log.rank] = entry.index
                if entry.seq is not None and entry.group is not None:
                    self._add(log.rank, entry, entry.seq)

    def _add(self, rank: int, entry: Collective, seq: int) -> None:
        key = key_of(entry)
        chain = self._chains.get(key)
        if chain is None:
            self._chains[key] = chain = _Chain(rank)
            if len(self._chains) > _MAX_GROUPS:
                del self._chains[next(iter(self._chains))]
        if chain.rank == rank:
            chain.add(entry, seq)

    def encode(self) -> str:
        """Return the marks of the newest groups as text for the other nodes."""
        newest = list(self._chains.items())[-_MAX_SAID:]
        return json.dumps({_name(key): dict(chain.marks.values()) for key, chain in newest}, separators=(",", ":"))

    def find_different(self, text: str) -> set[str]:
        """Return the groups whose collectives differ between this node and the one that encoded `text`."""
        theirs = json.loads(text) if text else {}
        mine = {_name(key): chain for key, chain in self._chains.items()}
        return {
            name
            for name, said in theirs.items()
            if name in mine and any(said.get(str(at), mark) != mark for at, mark in mine[name].marks.values())
        }


def _name(key: Key) -> str:
    return f"{zlib.crc32(repr(key).encode()):08x}"
