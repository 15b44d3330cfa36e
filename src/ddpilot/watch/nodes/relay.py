# SPDX-License-Identifier: Apache-2.0
"""Send guard's notes from each node to node 0, and the findings from node 0 to the other nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ddpilot.findings.finding import Finding
from ddpilot.launching.observer import Carrier, Piece
from ddpilot.record.journal import Entry
from ddpilot.watch.nodes.bundle import Bundle, decode_bundle, encode_bundle
from ddpilot.watch.nodes.digest import MAX_CHARS

_ALL_CHARS = 2 * 1024 * 1024
_FEWEST_CHARS = 4 * 1024

PAUSE_NS = 400_000_000
"""Minimum interval between two pieces: one with every second look."""

QUIET_PAUSE_NS = 1_000_000_000
"""The same if nothing was noted: node 0 needs to know that nothing is missing."""

MAX_HELD = 20_000
"""Maximum number of entries of a node that wait to be sent or compared."""

_GOES_ON, _ENDS = "+", "."


def max_chars(num_others: int) -> int:
    """Return the maximum length of one text of a node that all others, or node 0, have to read."""
    return min(MAX_CHARS, max(_FEWEST_CHARS, _ALL_CHARS // (1 + num_others)))


class Outbox:
    """Sends bundles through `carrier`, in pieces."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._size = max_chars(len(carrier.places)) - 1
        self._pieces: deque[str] = deque()
        self._entries: list[tuple[int, Entry]] = []
        self._findings: list[Finding] = []
        self._sent_ns = 0
        self._has_begun = False
        self._is_awaited = carrier.node_rank != 0
        self.is_full = False
        """True if there was more than could be sent, so that entries are missing."""

    def put(self, by_rank: Mapping[int, Iterable[Entry]], findings: Iterable[Finding] = ()) -> None:
        """Queue new entries and findings."""
        self._entries += [(rank, entry) for rank, entries in by_rank.items() for entry in entries]
        self._findings += findings
        if len(self._entries) > MAX_HELD:
            self.is_full = True
            self._entries.clear()

    def send(self, now_ns: int, *, is_last: bool = False) -> None:
        """Send the next piece if it is due; nothing is sent before the first entry or finding."""
        self._has_begun |= bool(self._entries or self._findings)
        if self.is_full or not self._has_begun:
            return
        news = bool(self._entries or self._findings)
        if not (self._pieces or news or self._is_awaited):
            return
        pause_ns = PAUSE_NS if self._pieces or news else QUIET_PAUSE_NS
        if not is_last and now_ns - self._sent_ns < pause_ns:
            return
        if not self._pieces or is_last:
            bundle = Bundle(now_ns=now_ns, entries=self._entries, findings=self._findings, is_last=is_last)
            self._pieces += _split(encode_bundle(bundle), self._size)
            self._entries, self._findings = [], []
        self._sent_ns = now_ns
        self._carrier.append(self._pieces.popleft())
        while is_last and self._pieces:
            self._carrier.append(self._pieces.popleft())


def _split(text: str, size: int) -> list[str]:
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return [*(_GOES_ON + part for part in parts[:-1]), _ENDS + parts[-1]]


@dataclass(slots=True)
class Sender:
    """What one of the other nodes has sent so far."""

    offset_ns: int | None = None
    """From its clock to the clock here; too large by at most the shortest transfer time of its bundles."""
    told_ns: int | None = None
    """Time up to which all of its entries have arrived, on its own clock."""
    has_ended: bool = False
    fault: str = ""
    """Why what it sends can no longer be used; empty if it can."""
    _number: int = 0
    _text: list[str] = field(default_factory=list)

    def take(self, pieces: Sequence[Piece]) -> Iterator[Bundle]:
        """Add pieces and yield the bundles that are now complete."""
        for piece in pieces:
            self._number += 1
            if piece.number != self._number:
                self.fault = f"piece {self._number} of its notes is lost"
            if self.fault:
                return
            self._text.append(piece.text[1:])
            if piece.text[:1] == _GOES_ON:
                continue
            try:
                bundle = decode_bundle("".join(self._text))
            except ValueError as error:
                self.fault = str(error)
                return
            self._text.clear()
            offset_ns = piece.read_ns - bundle.now_ns
            self.offset_ns = offset_ns if self.offset_ns is None else min(offset_ns, self.offset_ns)
            self.told_ns = bundle.now_ns
            self.has_ended |= bundle.is_last
            yield bundle
