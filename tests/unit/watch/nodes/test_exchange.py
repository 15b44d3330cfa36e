# SPDX-License-Identifier: Apache-2.0
"""Two observers of two nodes: when they tell each other something, what each then knows, and what is said if not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from ddpilot.launching.observer import Chunk, Message
from ddpilot.watch.analysis import analyze
from ddpilot.watch.nodes.exchange import Exchange
from ddpilot.watch.snapshot.model import JobSnapshot, RankSnapshot
from tests.unit.watch.logs import S, Writer, alive, died, group_of, job, returned

WORLD = group_of(0, 1)


class Hand:
    """Carries letters by hand."""

    def __init__(self, other: int) -> None:
        self.node_rank = 1 - other
        self.places: Mapping[int, str] = {other: f"node {other} (there)"}
        self.messages: dict[int, Message] = {}
        self.written: list[str] = []
        self.fault = ""
        self.appended: list[str] = []
        self.pieces: dict[int, list[Chunk]] = {}

    def write(self, text: str) -> None:
        """Keep it."""
        self.written.append(text)

    def append(self, text: str) -> None:
        """Keep it."""
        self.appended.append(text)

    def take_chunks(self) -> Mapping[int, Sequence[Chunk]]:
        """What was given."""
        taken, self.pieces = self.pieces, {}
        return taken

    def give(self, to: Hand, node: int, at_ns: int) -> None:
        """The newest letter reaches the other node at that moment."""
        to.messages[node] = Message(self.written[-1], len(self.written), at_ns, at_ns)


class Node:
    """One node with its rank, whose clock is that of the logs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.hand = Hand(1 - number)
        self.exchange = Exchange(self.hand)

    def look(self, rank: RankSnapshot, after_s: float) -> JobSnapshot:
        """One look at its rank, so many seconds after everything began; what is known then."""
        here = replace(job([rank], after_s=after_s), world_size=2)
        view = self.exchange.widen(here)
        self.exchange.send(here, analyze(view), lambda each: each)
        return view


def waiting(rank: int) -> RankSnapshot:
    """In a barrier since 0.02 s."""
    return alive(Writer(rank, WORLD).call("all_reduce", 1).wait("barrier", 9))


def busy(rank: int) -> RankSnapshot:
    """Done with what the other is done with."""
    return alive(Writer(rank, WORLD).call("all_reduce", 1))


def at(after_s: float) -> int:
    """That moment, in nanoseconds."""
    return 100 * S + int(after_s * S)


def asked(zero: Node, one: Node) -> None:
    """Node 0's rank has waited for long enough that node 1 is asked."""
    zero.look(waiting(0), 1.0)
    zero.hand.give(one.hand, 0, at(1.0))


def test_exchange_says_nothing_while_all_is_well() -> None:
    """Nor where a collective has just begun, or a rank has returned."""
    zero = Node(0)
    zero.look(busy(0), 5.0)
    zero.look(waiting(0), 0.5)
    zero.look(returned(Writer(0, WORLD).call("all_reduce", 1)), 6.0)
    assert zero.hand.written == []


def test_exchange_asks_and_is_answered_once() -> None:
    """The one that is asked asks for nothing itself, so that there is an end of it."""
    zero, one = Node(0), Node(1)
    asked(zero, one)
    assert len(zero.hand.written) == 1
    view = one.look(busy(1), 1.1)
    assert list(view.ranks) == [0, 1]
    one.look(busy(1), 1.6)
    assert len(one.hand.written) == 1
    one.hand.give(zero.hand, 1, at(1.2))
    view = zero.look(waiting(0), 3.0)
    assert list(view.ranks) == [0, 1]
    (status,) = analyze(view).status
    assert "rank 1 has not called it" in status


def test_exchange_knows_the_rhythm_of_collectives_whose_end_does_not_show() -> None:
    """As NCCL's, until the next one begins: steps of a second are no reason to ask, a pause of more than that is."""
    zero, writer = Node(0), Writer(0, WORLD)
    for second in range(8):
        writer.wait("all_reduce", 1, is_watched=False, start_ns=at(second))
    zero.look(alive(writer), 8.4)
    assert zero.hand.written == []
    zero.look(alive(writer), 8.6)
    assert len(zero.hand.written) == 1


def test_exchange_asks_again_while_it_lasts_and_then_seldom() -> None:
    """Four letters in three seconds; after a minute one in five."""
    zero = Node(0)
    for tenth in range(10, 40):
        zero.look(waiting(0), tenth / 10)
    assert len(zero.hand.written) == 4
    for tenth in range(1000, 1100):
        zero.look(waiting(0), tenth / 10)
    assert len(zero.hand.written) == 4 + 2


def test_exchange_tells_of_a_death_at_once() -> None:
    """Also right after another letter."""
    zero = Node(0)
    zero.look(waiting(0), 1.0)
    zero.look(died(Writer(0, WORLD).call("all_reduce", 1).wait("barrier", 9)), 1.1)
    assert len(zero.hand.written) == 2


def test_exchange_forgets_what_may_not_hold_any_more() -> None:
    """A rank there may have come since: where one here has gone on, or after ten seconds."""
    zero, one = Node(0), Node(1)
    asked(zero, one)
    one.look(busy(1), 1.1)
    one.hand.give(zero.hand, 1, at(1.2))
    on = alive(Writer(0, WORLD).call("all_reduce", 1).call("barrier", 9).wait("barrier", 9, start_ns=at(3.0)))
    assert list(zero.look(waiting(0), 9.0).ranks) == [0, 1]
    assert list(zero.look(on, 4.0).ranks) == [0]
    assert list(zero.look(waiting(0), 12.0).ranks) == [0]


def test_exchange_keeps_what_is_the_end() -> None:
    """A rank that has returned comes no more, however long ago that was."""
    zero, one = Node(0), Node(1)
    asked(zero, one)
    one.look(returned(Writer(1, WORLD).call("all_reduce", 1)), 1.1)
    one.hand.give(zero.hand, 1, at(1.2))
    (finding,) = analyze(zero.look(waiting(0), 60.0)).findings
    assert (finding.code, finding.ranks) == ("DDP208", (1,))


def test_exchange_waits_for_answers_and_then_names_who_gave_none() -> None:
    """2.5 s after it began to ask."""
    zero = Node(0)
    zero.look(waiting(0), 1.0)
    assert zero.exchange.is_waiting(at(2.0))
    assert not list(zero.exchange.complaints(at(2.0)))
    assert not zero.exchange.is_waiting(at(4.0))
    assert list(zero.exchange.complaints(at(4.0))) == [
        "the ranks of node 1 (there) are not visible from here: its observer does not respond"
    ]


def test_exchange_says_what_it_cannot_read() -> None:
    """As of a node with another version."""
    zero = Node(0)
    zero.hand.messages[1] = Message("{}", 1, at(0.5), at(0.6))
    zero.look(waiting(0), 1.0)
    (line,) = zero.exchange.complaints(at(4.0))
    assert line.startswith("the ranks of node 1 (there) are not visible from here: not a digest of a node")


def test_exchange_says_that_the_store_is_gone_only_where_it_is_needed() -> None:
    """At a job's end its store goes before its ranks do."""
    zero = Node(0)
    zero.hand.fault = "Connection reset by peer"
    zero.look(busy(0), 1.0)
    assert not list(zero.exchange.complaints(at(1.0)))
    zero.look(waiting(0), 2.0)
    assert list(zero.exchange.complaints(at(2.0))) == [
        "the observers of the nodes can no longer reach each other: Connection reset by peer"
    ]
    assert zero.exchange.has_received_since(time.monotonic_ns())


def test_exchange_finds_a_different_reduce_op_on_another_node_without_a_rank_that_waits() -> None:
    """A digest is written every 30 s while all is well; the node that reads it reports the finding and asks."""
    zero, one = Node(0), Node(1)
    ranks = [
        alive(Writer(0, WORLD).call("all_reduce", 1).call("all_reduce", 2)),
        alive(Writer(1, WORLD).call("all_reduce", 1).call("all_reduce", 2, reduce_op="MAX")),
    ]
    for after_s in (1.0, 30.0, 31.0):
        one.look(ranks[1], after_s)
    assert len(one.hand.written) == 1
    one.hand.give(zero.hand, 1, at(31.4))
    (finding,) = analyze(zero.look(ranks[0], 31.5)).findings
    assert (finding.code, finding.severity) == ("DDP204", "error")
    assert len(zero.hand.written) == 1


def test_exchange_writes_together_with_another_node_while_all_is_well() -> None:
    """A digest that arrives is followed by the own one, without stacks, which take signals to the ranks; once."""
    zero, one = Node(0), Node(1)
    zero.look(busy(0), 1.0)
    one.look(busy(1), 15.0)
    zero.look(busy(0), 31.0)
    zero.hand.give(one.hand, 0, at(31.2))
    here = replace(job([busy(1)], after_s=31.3), world_size=2)
    one.exchange.send(here, analyze(one.exchange.widen(here)), lambda _: pytest.fail("stacks were taken"))
    one.look(busy(1), 31.8)
    assert [len(node.hand.written) for node in (zero, one)] == [1, 1]
