# SPDX-License-Identifier: Apache-2.0
"""Run the guard rules that compare ranks if the ranks are on several nodes: on node 0, for all nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.gathering import some
from ddpilot.guard.rules.registry import RuleBook
from ddpilot.launching.observer import Carrier
from ddpilot.record.journal import Entry
from ddpilot.watch.nodes.relay import MAX_HELD, Outbox, Sender

_SLACK_NS = 1_000_000_000
"""Margin for errors of the clock offset between nodes: nothing counts as missing before it has passed."""

_SLICE_NS = 100_000_000
"""Entries of all ranks are fed to the rules in time slices of this length."""

_LAST_S = 1.25
"""At the end of a job, wait at most this long for the last bundles of the other nodes."""

_PAUSE_S = 0.05

ByRank = Mapping[int, Sequence[Entry]]


class Comparing:
    """Compares ranks across nodes, on the node that `carrier` belongs to.

    `make_book`: returns the rules for all ranks; called on node 0 only. If the notes of a node cannot be read, the
    comparison ends: without them its ranks would seem to have done nothing.
    """

    def __init__(self, carrier: Carrier, make_book: Callable[[], RuleBook]) -> None:
        self._carrier = carrier
        self._book = make_book() if carrier.node_rank == 0 else None
        self._outbox = Outbox(carrier)
        self._senders = {node: Sender() for node in carrier.places}
        self._held: dict[int, list[tuple[int, Entry]]] = {node: [] for node in (0, *carrier.places)}
        self._fault = ""

    @property
    def faults(self) -> list[str]:
        """Why ranks of different nodes are no longer compared, and errors raised by rules."""
        return [*([self._fault] if self._fault else ()), *(self._book.faults if self._book is not None else ())]

    def feed(self, here: ByRank, now_ns: int, *, is_last: bool = False) -> list[Finding]:
        """Add entries of the ranks here and return node 0's new findings. `is_last`: no more entries will follow."""
        found = self._take()
        if self._book is None:
            self._outbox.put(here)
        else:
            self._held[0] += [(rank, entry) for rank, entries in here.items() for entry in entries]
            if is_last:
                self._await_others()
            found = self._compare(self._book, now_ns, is_last=is_last)
            self._outbox.put({}, found)
        self._outbox.send(now_ns, is_last=is_last)
        self._look_for_faults()
        return found

    def _take(self) -> list[Finding]:
        """Take what other nodes have sent: on node 0 entries, on the other nodes the findings of node 0."""
        found: list[Finding] = []
        for node, pieces in self._carrier.take_pieces().items():
            for bundle in self._senders[node].take(pieces):
                self._held[node] += bundle.entries
                found += bundle.findings
        return found

    def _compare(self, book: RuleBook, now_ns: int, *, is_last: bool) -> list[Finding]:
        if self._fault:
            return []
        until_ns = min((self._known_ns(node, now_ns) for node in self._senders), default=now_ns)
        slices: dict[int, dict[int, list[Entry]]] = {}
        for rank, entry in self._ready(until_ns):
            slices.setdefault(entry.time_ns // _SLICE_NS, {}).setdefault(rank, []).append(entry)
        found: list[Finding] = []
        for number, by_rank in sorted(slices.items()):
            found += book.feed(by_rank, min(until_ns, (number + 1) * _SLICE_NS) - _SLACK_NS)
        found += book.feed({}, until_ns - _SLACK_NS)
        if is_last and self._have_ended():
            found += book.finish(now_ns)
        return found

    def _known_ns(self, node: int, now_ns: int) -> int:
        """Time up to which all entries of that node have arrived."""
        sender = self._senders[node]
        if sender.told_ns is None or sender.offset_ns is None:
            return 0
        return now_ns if sender.has_ended else min(now_ns, sender.told_ns + sender.offset_ns)

    def _ready(self, until_ns: int) -> Iterator[tuple[int, Entry]]:
        for node, held in self._held.items():
            offset_ns = 0 if node == 0 else self._senders[node].offset_ns or 0
            # A node's entries arrive rank by rank, so a newer entry of one rank may precede older ones of the next
            # rank.
            self._held[node] = [(rank, entry) for rank, entry in held if entry.time_ns + offset_ns > until_ns]
            for rank, entry in held:
                if entry.time_ns + offset_ns <= until_ns:
                    yield rank, replace(entry, time_ns=entry.time_ns + offset_ns)

    def _have_ended(self) -> bool:
        return all(sender.has_ended for sender in self._senders.values())

    def _await_others(self) -> None:
        """Wait at most `_LAST_S` for the last bundles of the other nodes, if all of them have sent before."""
        deadline_s = time.monotonic() + _LAST_S
        while (
            not self._have_ended()
            and all(sender.told_ns is not None for sender in self._senders.values())
            and not (self._fault or self._carrier.fault)
            and time.monotonic() < deadline_s
        ):
            time.sleep(_PAUSE_S)
            self._take()

    def _look_for_faults(self) -> None:
        places = self._carrier.places
        reasons = [f"{places[node]}: {sender.fault}" for node, sender in self._senders.items() if sender.fault]
        if self._outbox.is_full:
            reasons.append("the ranks of this node note more than can be sent")
        if any(len(held) > MAX_HELD for held in self._held.values()):
            silent = [place for node, place in places.items() if self._senders[node].told_ns is None]
            reasons.append(f"too little comes from {some(silent or list(places.values()))}")
        if reasons and not self._fault:
            self._fault = f"guard no longer compares ranks of different nodes: {reasons[0]}"
        if self._fault:
            for held in self._held.values():
                held.clear()
