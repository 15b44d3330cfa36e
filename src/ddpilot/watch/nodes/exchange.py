# SPDX-License-Identifier: Apache-2.0
"""Exchange digests of ranks between nodes' observers: now and then while all is well, else as often as needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

from ddpilot.launching.observer import Mailbox, Message
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
"""A routine digest follows a received one of at most this age, so that connections are idle the rest of the time."""

_NUM_CHECKED = 64
"""Number of a rank's newest collectives whose pauses show when the next one is due."""


class Exchange:
    """The exchange of an observer with the nodes that `mailbox` reaches. Not thread-safe."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self._max_chars = max_chars(len(mailbox.places))
        self._numbers: dict[int, int] = {}
        self._digests: dict[int, Digest] = {}
        self._received_ns: dict[int, int] = {}
        self._unreadable: dict[int, str] = {}
        self._asking_ns: int | None = None
        self._begun_ns = self._sent_ns = 0
        self._gone: frozenset[int] = frozenset()

    def widen(self, job: JobSnapshot) -> JobSnapshot:
        """Add ranks of other nodes to `job`, which holds the ranks here, as far as their digests are recent enough."""
        for node, message in self.mailbox.messages.items():
            if message.number != self._numbers.get(node):
                self._numbers[node] = message.number
                self._read(node, message)
        newest_ns = max((entry.start_ns for rank in job.ranks.values() for entry in rank.collectives[-1:]), default=0)
        return merge(job, [each for each in self._digests.values() if _still_holds(each, job.now_ns, newest_ns)])

    def _read(self, node: int, message: Message) -> None:
        try:
            digest = decode_digest(message.text)
        except ValueError as error:
            self._unreadable[node] = str(error)
            return
        self._received_ns[node] = message.before_ns
        self._digests[node] = move_clock(
            digest,
            unix_minus_monotonic_ns=time.time_ns() - time.monotonic_ns(),
            after_ns=message.after_ns,
            before_ns=message.before_ns,
        )

    def send(self, job: JobSnapshot, analysis: Analysis, with_stacks: Callable[[JobSnapshot], JobSnapshot]) -> None:
        """Send the other nodes a digest of the ranks of `job`, if there is a reason here or they have requested one.

        `analysis`: of all ranks that are known. `with_stacks`: returns the snapshot with the stacks of all ranks here.
        """
        is_asking = bool(analysis.findings or analysis.status) or any(map(_needs_others(job), job.ranks.values()))
        self._asking_ns = (self._asking_ns or job.now_ns) if is_asking else None
        gone = frozenset(rank for rank, each in job.ranks.items() if _is_gone(each))
        if self._is_due(job.now_ns) or (is_asking and gone != self._gone):
            self._gone = gone
            self._send(with_stacks(job), is_asking=is_asking)
        elif self._is_routine_due(job.now_ns):
            self._send(job, is_asking=False)  # a stack would take a signal to each rank

    def send_final(self, job: JobSnapshot) -> None:
        """Send the last digest of the ranks of `job`."""
        self._send(job, is_asking=False)

    def _send(self, job: JobSnapshot, *, is_asking: bool) -> None:
        self._sent_ns = job.now_ns
        unix_ns = job.now_ns + time.time_ns() - time.monotonic_ns()
        digest = Digest(now_ns=job.now_ns, unix_ns=unix_ns, is_asking=is_asking, ranks=job.ranks)
        self.mailbox.write(encode_digest(digest, self._max_chars))

    def _is_due(self, now_ns: int) -> bool:
        since_ns = now_ns - self._sent_ns
        if self._asking_ns is not None:
            return since_ns >= (_AGAIN_NS if now_ns - self._asking_ns < _SELDOM_AFTER_NS else _SELDOM_NS)
        asked_ns = max((self._received_ns[node] for node, each in self._digests.items() if each.is_asking), default=0)
        return asked_ns > self._sent_ns and since_ns >= _ANSWER_AGAIN_NS

    def _is_routine_due(self, now_ns: int) -> bool:
        self._begun_ns = self._begun_ns or now_ns
        since_ns = now_ns - max(self._sent_ns, self._begun_ns)
        received_ns = max(self._received_ns.values(), default=0)
        return since_ns >= (_ROUTINE_NS // 2 if now_ns - received_ns < _JUST_NOW_NS else _ROUTINE_NS)

    def is_waiting(self, now_ns: int) -> bool:
        """True if other nodes have been asked and may still answer."""
        return self._asking_ns is not None and now_ns - self._asking_ns < _PATIENCE_NS and bool(self._silent())

    def has_received_since(self, since_ns: int) -> bool:
        """True if every other node has sent a digest since `since_ns`, or the connection has failed."""
        is_off = bool(self.mailbox.fault)
        return is_off or all(self._received_ns.get(node, 0) >= since_ns for node in self.mailbox.places)

    def _silent(self) -> list[int]:
        """Return the nodes that have not sent a digest since this node asked."""
        finals = [node for node, each in self._digests.items() if each.is_final]
        places = self.mailbox.places
        return [
            node for node in places if node not in finals and self._received_ns.get(node, 0) < (self._asking_ns or 0)
        ]

    def complaints(self, now_ns: int) -> Iterator[str]:
        """Yield lines about why ranks of other nodes are not seen; each is to be shown once."""
        if self._asking_ns is None:
            return
        if self.mailbox.fault:
            yield f"the observers of the nodes can no longer reach each other: {self.mailbox.fault}"
        elif now_ns - self._asking_ns > _PATIENCE_NS:
            places = self.mailbox.places
            for node in self._silent():
                why = self._unreadable.get(node, "its observer does not respond")
                yield f"the ranks of {places[node]} are not visible from here: {why}"


def _still_holds(digest: Digest, now_ns: int, newest_ns: int) -> bool:
    age_ns = now_ns - digest.now_ns
    return digest.is_final or age_ns < _FRESH_NS or (digest.now_ns > newest_ns and age_ns < _OLD_NS)


def _is_gone(rank: RankSnapshot) -> bool:
    return rank.error is not None or rank.process.state == "ended"


def _needs_others(job: JobSnapshot) -> Callable[[RankSnapshot], bool]:
    """Return a predicate: True for a rank whose state cannot be explained by the ranks here alone."""

    def needs(rank: RankSnapshot) -> bool:
        if _is_gone(rank) and not rank.returned:
            return True
        newest = rank.collectives[-_NUM_CHECKED:]
        open_ns = [job.now_ns - each.start_ns for each in newest if each.state == "begun" and each.is_watched]
        unsure_ns = [job.now_ns - each.start_ns for each in newest if each.state == "begun" and not each.is_watched]
        if max(open_ns, default=0) > _ASK_AFTER_NS:
            return True
        # One of these may be over: the next collective would show it, and is due after the usual pause.
        starts_ns = sorted(entry.start_ns for entry in newest)
        longest_ns = max((later - before for before, later in pairwise(starts_ns)), default=0)
        return min(unsure_ns, default=0) > max(_ASK_AFTER_NS, int(_LATE * longest_ns))

    return needs
