# SPDX-License-Identifier: Apache-2.0
"""Run the guard rules that compare ranks of several nodes, on node 0.

Every node sends guard's notes to node 0, in bundles of text, and gets the findings back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.registry import RuleRunner
from ddpilot.guard.rules.rule import some
from ddpilot.launching.observer import Chunk, Mailbox
from ddpilot.record.journal import Entry
from ddpilot.watch.nodes.digest import decode, encode, max_chars

_SLACK_NS = 1_000_000_000
"""Margin for errors of the clock offset between nodes: nothing counts as missing before it has passed."""

_SLICE_NS = 100_000_000
"""Entries of all ranks are fed to the rules in time slices of this length."""

_LAST_S = 1.25
"""At the end of a job, wait at most this long for the last bundles of the other nodes."""

_PAUSE_S = 0.05

ByRank = Mapping[int, Sequence[Entry]]


class SharedRules:
    """Compares ranks across nodes, on the node that `mailbox` belongs to.

    `make_rules`: returns the rules for all ranks; called on node 0 only. If the notes of a node cannot be read, the
    comparison ends: without them its ranks would seem to have done nothing.
    """

    def __init__(self, mailbox: Mailbox, make_rules: Callable[[], RuleRunner]) -> None:
        self._mailbox = mailbox
        self._rules = make_rules() if mailbox.node_rank == 0 else None
        self._sender = NoteSender(mailbox)
        self._receivers = {node: NoteReceiver() for node in mailbox.places}
        self._held: dict[int, list[tuple[int, Entry]]] = {node: [] for node in (0, *mailbox.places)}
        self._fault = ""

    @property
    def faults(self) -> list[str]:
        """Why ranks of different nodes are no longer compared, and errors raised by rules."""
        return [*([self._fault] if self._fault else ()), *(self._rules.faults if self._rules is not None else ())]

    def feed(self, here: ByRank, now_ns: int, *, is_last: bool = False) -> list[Finding]:
        """Add entries of the ranks here and return node 0's new findings. `is_last`: no more entries will follow."""
        found = self._take()
        if self._rules is None:
            self._sender.put(here)
        else:
            self._held[0] += [(rank, entry) for rank, entries in here.items() for entry in entries]
            if is_last:
                self._await_others()
            found = self._compare(self._rules, now_ns, is_last=is_last)
            self._sender.put({}, found)
        self._sender.send(now_ns, is_last=is_last)
        self._check_faults()
        return found

    def _take(self) -> list[Finding]:
        """Take what other nodes have sent: on node 0 entries, on the other nodes the findings of node 0."""
        found: list[Finding] = []
        for node, pieces in self._mailbox.take_chunks().items():
            for bundle in self._receivers[node].take(pieces):
                self._held[node] += bundle.entries
                found += bundle.findings
        return found

    def _compare(self, rules: RuleRunner, now_ns: int, *, is_last: bool) -> list[Finding]:
        if self._fault:
            return []
        until_ns = min((self._known_ns(node, now_ns) for node in self._receivers), default=now_ns)
        slices: dict[int, dict[int, list[Entry]]] = {}
        for rank, entry in self._ready(until_ns):
            slices.setdefault(entry.time_ns // _SLICE_NS, {}).setdefault(rank, []).append(entry)
        found: list[Finding] = []
        for number, by_rank in sorted(slices.items()):
            found += rules.feed(by_rank, min(until_ns, (number + 1) * _SLICE_NS) - _SLACK_NS)
        found += rules.feed({}, until_ns - _SLACK_NS)
        if is_last and self._have_ended():
            found += rules.finish(now_ns)
        return found

    def _known_ns(self, node: int, now_ns: int) -> int:
        """Time up to which all entries of that node have arrived."""
        receiver = self._receivers[node]
        if receiver.known_until_ns is None or receiver.offset_ns is None:
            return 0
        return now_ns if receiver.has_ended else min(now_ns, receiver.known_until_ns + receiver.offset_ns)

    def _ready(self, until_ns: int) -> Iterator[tuple[int, Entry]]:
        for node, held in self._held.items():
            offset_ns = 0 if node == 0 else self._receivers[node].offset_ns or 0
            # A node's entries arrive rank by rank, so a newer entry of one rank may precede older ones of the next
            # rank.
            self._held[node] = [(rank, entry) for rank, entry in held if entry.time_ns + offset_ns > until_ns]
            for rank, entry in held:
                if entry.time_ns + offset_ns <= until_ns:
                    yield rank, replace(entry, time_ns=entry.time_ns + offset_ns)

    def _have_ended(self) -> bool:
        return all(receiver.has_ended for receiver in self._receivers.values())

    def _await_others(self) -> None:
        """Wait at most `_LAST_S` for the last bundles of the other nodes, if all of them have sent before."""
        deadline_s = time.monotonic() + _LAST_S
        while (
            not self._have_ended()
            and all(receiver.known_until_ns is not None for receiver in self._receivers.values())
            and not (self._fault or self._mailbox.fault)
            and time.monotonic() < deadline_s
        ):
            time.sleep(_PAUSE_S)
            self._take()

    def _check_faults(self) -> None:
        places = self._mailbox.places
        reasons = [f"{places[node]}: {receiver.fault}" for node, receiver in self._receivers.items() if receiver.fault]
        if self._sender.is_full:
            reasons.append("the ranks of this node record more notes than can be sent")
        if any(len(held) > MAX_HELD for held in self._held.values()):
            silent = [place for node, place in places.items() if self._receivers[node].known_until_ns is None]
            reasons.append(f"too few notes arrive from {some(silent or list(places.values()))}")
        if reasons and not self._fault:
            self._fault = f"guard no longer compares ranks of different nodes: {reasons[0]}"
        if self._fault:
            for held in self._held.values():
                held.clear()


PAUSE_NS = 400_000_000
"""Minimum interval between two pieces: one with every second poll."""

QUIET_PAUSE_NS = 1_000_000_000
"""The same if nothing was noted: node 0 needs to know that nothing is missing."""

MAX_HELD = 20_000
"""Maximum number of entries of a node that wait to be sent or compared."""

_CONTINUES, _ENDS = "+", "."


class NoteSender:
    """Sends bundles through `mailbox`, in pieces."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._size = max_chars(len(mailbox.places)) - 1
        self._pieces: deque[str] = deque()
        self._entries: list[tuple[int, Entry]] = []
        self._findings: list[Finding] = []
        self._sent_ns = 0
        self._has_begun = False
        self._is_awaited = mailbox.node_rank != 0
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
            entries, findings = tuple(self._entries), tuple(self._findings)
            bundle = Bundle(now_ns=now_ns, entries=entries, findings=findings, is_last=is_last)
            text = encode_bundle(bundle)
            parts = [text[at : at + self._size] for at in range(0, len(text), self._size)]
            self._pieces += [*(_CONTINUES + part for part in parts[:-1]), _ENDS + parts[-1]]
            self._entries, self._findings = [], []
        self._sent_ns = now_ns
        self._mailbox.append(self._pieces.popleft())
        while is_last and self._pieces:
            self._mailbox.append(self._pieces.popleft())


@dataclass(slots=True)
class NoteReceiver:
    """Assembles the bundles of one other node."""

    offset_ns: int | None = None
    """From its clock to the clock here; too large by at most the shortest transfer time of its bundles."""
    known_until_ns: int | None = None
    """Time up to which all of its entries have arrived, on its own clock."""
    has_ended: bool = False
    fault: str = ""
    """Why what it sends can no longer be used; empty if it can."""
    _number: int = 0
    _text: list[str] = field(default_factory=list)

    def take(self, pieces: Sequence[Chunk]) -> Iterator[Bundle]:
        """Add pieces and yield the bundles that are now complete."""
        for piece in pieces:
            self._number += 1
            if piece.number != self._number:
                self.fault = f"piece {self._number} of its notes was lost"
            if self.fault:
                return
            self._text.append(piece.text[1:])
            if piece.text[:1] == _CONTINUES:
                continue
            try:
                bundle = decode_bundle("".join(self._text))
            except ValueError as error:
                self.fault = str(error)
                return
            self._text.clear()
            offset_ns = piece.read_ns - bundle.now_ns
            self.offset_ns = offset_ns if self.offset_ns is None else min(offset_ns, self.offset_ns)
            self.known_until_ns = bundle.now_ns
            self.has_ended |= bundle.is_last
            yield bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """New notes and findings of one node since its previous bundle."""

    now_ns: int
    """The bundle is complete up to this time, on the CLOCK_MONOTONIC of the node that wrote it."""
    entries: tuple[tuple[int, Entry], ...] = ()
    """(rank, entry) pairs; the entries of one rank are in order."""
    findings: tuple[Finding, ...] = ()
    is_last: bool = False
    """True if the ranks of that node have ended."""


def encode_bundle(bundle: Bundle) -> str:
    """Encode the bundle as text."""
    return encode(now_ns=bundle.now_ns, entries=bundle.entries, findings=bundle.findings, is_last=bundle.is_last)


def decode_bundle(text: str) -> Bundle:
    """Decode what `encode_bundle` wrote. Raises `ValueError` for any other text."""
    try:
        return decode(text, Bundle)
    except ValueError as error:
        raise ValueError(f"not a bundle of a node: {error}") from error
