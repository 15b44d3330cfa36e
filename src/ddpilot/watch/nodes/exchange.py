# SPDX-License-Identifier: Apache-2.0
"""Exchange digests of ranks between nodes' observers: now and then while all is well, else as often as needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from ddpilot.launching.observer import Mailbox, Message
from ddpilot.record.flight_ring.log import Collective
from ddpilot.watch.analysis import Analysis
from ddpilot.watch.nodes.digest import Digest, decode_digest, encode_digest, max_chars, merge, move_clock
from ddpilot.watch.snapshot.model import JobSnapshot, RankSnapshot

_ASK_AFTER_NS = 600_000_000
"""Ask the other nodes about a collective that has been unfinished for this long."""

_LATE = 1.5
"""A rank is late if it has begun no collective for this many times its longest pause between collectives."""

_AGAIN_NS = 750_000_000
"""Minimum interval between two requests to the other nodes."""

_SELDOM_AFTER_NS = 60_000_000_000
_SELDOM_NS = 5_000_000_000
"""The same after `_SELDOM_AFTER_NS`: a wait that has lasted for a minute may last for hours."""

_ANSWER_AGAIN_NS = 200_000_000
"""Minimum interval between two answers: nodes that ask at the same time share one."""

_PATIENCE_NS = 2_500_000_000
"""How long to wait for answers, from the first request, before reporting what is known without them."""

_FRESH_NS = 1_900_000_000
"""A digest younger than this counts as the present state of a node; waits are reported after 2 s."""

_OLD_NS = 10_000_000_000
"""The same if no rank here has begun a collective since."""

_ROUTINE_NS = 30_000_000_000
"""Interval between digests while all is well: ranks of two nodes may call collectives with different reduce-ops, for
which no rank waits.
"""

_JUST_NOW_NS = 2_000_000_000
"""The nodes write these at the same time: one follows another's of this age, so that the connections are idle else."""

_NUM_LOOKED_AT = 64
"""Number of a rank's newest collectives whose pauses show when the next one is due."""


class Exchange:
    """The exchange of the observer of `ranks` with the nodes that `carrier` reaches. Not thread-safe."""

    def __init__(self, carrier: Mailbox, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.carrier = carrier
        self._max_chars = max_chars(len(carrier.places))
        self._numbers: dict[int, int] = {}
        self._digests: dict[int, Digest] = {}
        self._heard_ns: dict[int, int] = {}
        self._unreadable: dict[int, str] = {}
        self._asking_ns: int | None = None
        self._begun_ns = self._told_ns = 0
        self._gone: frozenset[int] = frozenset()

    def widen(self, view: JobSnapshot) -> JobSnapshot:
        """Add ranks of other nodes to `view`, which holds the ranks here, as far as their digests are recent enough."""
        for node, letter in self.carrier.messages.items():
            if letter.number != self._numbers.get(node):
                self._numbers[node] = letter.number
                self._read(node, letter)
        newest_ns = max((entry.start_ns for rank in view.ranks.values() for entry in _newest(rank, 1)), default=0)
        return merge(view, [each for each in self._digests.values() if _still_holds(each, view.now_ns, newest_ns)])

    def _read(self, node: int, letter: Message) -> None:
        try:
            digest = decode_digest(letter.text)
        except ValueError as error:
            self._unreadable[node] = str(error)
            return
        self._heard_ns[node] = letter.before_ns
        self._digests[node] = move_clock(
            digest,
            unix_minus_monotonic_ns=time.time_ns() - time.monotonic_ns(),
            after_ns=letter.after_ns,
            before_ns=letter.before_ns,
        )

    def tell(self, view: JobSnapshot, analysis: Analysis, with_stacks: Callable[[JobSnapshot], JobSnapshot]) -> None:
        """Send the other nodes a digest of the ranks of `view`, if there is a reason here or they have requested one.

        `analysis`: of all ranks that are known. `with_stacks`: returns the view with the stacks of all ranks here.
        """
        is_asking = bool(analysis.findings or analysis.status) or any(map(_needs_others(view), view.ranks.values()))
        self._asking_ns = (self._asking_ns or view.now_ns) if is_asking else None
        gone = frozenset(rank for rank, each in view.ranks.items() if _is_gone(each))
        if self._is_due(view.now_ns) or (is_asking and gone != self._gone):
            self._gone = gone
            self._write(with_stacks(view), is_asking=is_asking)
        elif self._is_routine_due(view.now_ns):
            self._write(view, is_asking=False)  # a stack would take a signal to each rank

    def say_farewell(self, view: JobSnapshot) -> None:
        """Send the last digest of the ranks of `view`."""
        self._write(view, is_asking=False)

    def _write(self, view: JobSnapshot, *, is_asking: bool) -> None:
        self._told_ns = view.now_ns
        unix_ns = view.now_ns + time.time_ns() - time.monotonic_ns()
        digest = Digest(now_ns=view.now_ns, unix_ns=unix_ns, is_asking=is_asking, ranks=view.ranks)
        self.carrier.write(encode_digest(digest, self._max_chars))

    def _is_due(self, now_ns: int) -> bool:
        since_ns = now_ns - self._told_ns
        if self._asking_ns is not None:
            return since_ns >= (_AGAIN_NS if now_ns - self._asking_ns < _SELDOM_AFTER_NS else _SELDOM_NS)
        asked_ns = max((self._heard_ns[node] for node, each in self._digests.items() if each.is_asking), default=0)
        return asked_ns > self._told_ns and since_ns >= _ANSWER_AGAIN_NS

    def _is_routine_due(self, now_ns: int) -> bool:
        self._begun_ns = self._begun_ns or now_ns
        since_ns = now_ns - max(self._told_ns, self._begun_ns)
        heard_ns = max(self._heard_ns.values(), default=0)
        return since_ns >= (_ROUTINE_NS // 2 if now_ns - heard_ns < _JUST_NOW_NS else _ROUTINE_NS)

    def is_waiting(self, now_ns: int) -> bool:
        """True if other nodes have been asked and may still answer."""
        return self._asking_ns is not None and now_ns - self._asking_ns < _PATIENCE_NS and bool(self._silent())

    def has_heard_since(self, since_ns: int) -> bool:
        """True if every other node has sent a digest since `since_ns`, or the connection has failed."""
        is_off = bool(self.carrier.fault)
        return is_off or all(self._heard_ns.get(node, 0) >= since_ns for node in self.carrier.places)

    def _silent(self) -> list[int]:
        """Return the nodes that have not sent a digest since this node asked."""
        finals = [node for node, each in self._digests.items() if each.is_final]
        places = self.carrier.places
        return [node for node in places if node not in finals and self._heard_ns.get(node, 0) < (self._asking_ns or 0)]

    def complaints(self, now_ns: int) -> Iterator[str]:
        """Yield lines about why ranks of other nodes are not seen; each is to be shown once."""
        if self._asking_ns is None:
            return
        if self.carrier.fault:
            yield f"the observers of the nodes cannot reach each other any more: {self.carrier.fault}"
        elif now_ns - self._asking_ns > _PATIENCE_NS:
            places = self.carrier.places
            for node in self._silent():
                why = self._unreadable.get(node, "its observer does not answer")
                yield f"what the ranks of {places[node]} do is not seen from here: {why}"


def _still_holds(digest: Digest, now_ns: int, newest_ns: int) -> bool:
    age_ns = now_ns - digest.now_ns
    return digest.is_final or age_ns < _FRESH_NS or (digest.now_ns > newest_ns and age_ns < _OLD_NS)


def _newest(rank: RankSnapshot, num: int) -> Sequence[Collective]:
    return rank.log.collectives[-num:] if rank.log is not None else ()


def _is_gone(rank: RankSnapshot) -> bool:
    return rank.error is not None or rank.process.state == "ended"


def _needs_others(view: JobSnapshot) -> Callable[[RankSnapshot], bool]:
    """Return a predicate: True for a rank whose state cannot be explained by the ranks here alone."""

    def needs(rank: RankSnapshot) -> bool:
        if _is_gone(rank) and not rank.returned:
            return True
        newest = _newest(rank, _NUM_LOOKED_AT)
        open_ns = [view.now_ns - each.start_ns for each in newest if each.state == "begun" and each.is_watched]
        unsure_ns = [view.now_ns - each.start_ns for each in newest if each.state == "begun" and not each.is_watched]
        if max(open_ns, default=0) > _ASK_AFTER_NS:
            return True
        # One of these may be over: the next collective would show it, and is due after the usual pause.
        return min(unsure_ns, default=0) > max(_ASK_AFTER_NS, int(_LATE * _longest_pause_ns(newest)))

    return needs


def _longest_pause_ns(entries: Sequence[Collective]) -> int:
    starts = sorted(entry.start_ns for entry in entries)
    return max((later - before for before, later in pairwise(starts)), default=0)
