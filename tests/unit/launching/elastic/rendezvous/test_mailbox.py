# SPDX-License-Identifier: Apache-2.0
"""Letters between nodes: what is read when, and what of an earlier attempt is not."""

from __future__ import annotations

from dataclasses import replace

from torch._C._distributed_c10d import HashStore

from ddpilot.launching.elastic.rendezvous.mailbox import NUM_SLOTS, StoreMailbox
from ddpilot.launching.elastic.rendezvous.node_state import NodeState

ZERO = NodeState(node_rank=0, host="here", pid=7, nnodes=2, nproc_per_node=1, target="train.py", attempt=0)
ONE = replace(ZERO, node_rank=1, host="there")


def exchange(store: HashStore, zero: StoreMailbox, one: StoreMailbox) -> None:
    """What the threads with the connections do, node 1 first."""
    num_letters, num_pieces = one.send(store)
    states = [replace(ONE, letter=num_letters, num_pieces=num_pieces, attempt=one.attempt)]
    zero.send(store)
    zero.fetch(store, states, 5_000_000_000)


def posts(attempt: int = 0) -> tuple[StoreMailbox, StoreMailbox]:
    """Of both nodes."""
    return StoreMailbox(ZERO, attempt, lambda: None), StoreMailbox(ONE, attempt, lambda: None)


def test_post_carries_the_newest_letter_and_says_between_which_moments_it_was_written() -> None:
    """What was written before that is gone; nothing is read twice."""
    store = HashStore()
    zero, one = posts()
    exchange(store, zero, one)
    assert zero.letters == {}
    assert zero.places == {1: "node 1 (there)"}
    one.write("first")
    one.write("second")
    exchange(store, zero, one)
    letter = zero.letters[1]
    assert (letter.text, letter.number, letter.after_ns) == ("second", 2, 4_000_000_000)
    assert letter.before_ns > letter.after_ns
    exchange(store, zero, one)
    assert zero.letters[1] is letter


def test_post_is_busy_only_after_letters() -> None:
    """While nobody writes the connection is used as often as without it."""
    store = HashStore()
    zero, one = posts()
    exchange(store, zero, one)
    assert [zero.is_busy, one.is_busy] == [False, False]
    one.write("news")
    exchange(store, zero, one)
    assert [zero.is_busy, one.is_busy] == [True, True]


def test_post_of_a_restart_reads_nothing_of_the_attempt_before() -> None:
    """Another node may not have seen yet that it is over."""
    store = HashStore()
    _, one = posts()
    one.write("old")
    zero, _ = posts(attempt=1)
    exchange(store, zero, one)
    assert zero.letters == {}


def test_post_carries_each_piece_once_and_in_order() -> None:
    """However many were appended between two exchanges; nobody is busy by that."""
    store = HashStore()
    zero, one = posts()
    read = []
    for texts in (["a"], [], ["b c", "d"]):
        for text in texts:
            one.append(text)
        exchange(store, zero, one)
        read.append([(piece.text, piece.number) for piece in zero.take_pieces().get(1, ())])
    assert read == [[("a", 1)], [], [("b c", 2), ("d", 3)]]
    assert not one.is_busy


def test_post_shows_by_the_numbers_that_pieces_were_overwritten() -> None:
    """Nobody had read them: the store keeps as many as it has slots."""
    store = HashStore()
    zero, one = posts()
    for number in range(NUM_SLOTS):
        one.append(str(number))
    one.send(store)
    one.append("one more")
    exchange(store, zero, one)
    assert [piece.number for piece in zero.take_pieces()[1]] == list(range(2, NUM_SLOTS + 2))
    assert store.num_keys() == NUM_SLOTS


def test_post_of_node_1_reads_the_pieces_of_node_0_alone() -> None:
    """Those of other nodes are for node 0."""
    store = HashStore()
    two = StoreMailbox(replace(ONE, node_rank=2, nnodes=3), 0, lambda: None)
    states = []
    for state in (ZERO, ONE):
        post = StoreMailbox(state, 0, lambda: None)
        post.append("news")
        states.append(replace(state, num_pieces=post.send(store)[1]))
    two.fetch(store, states, 5_000_000_000)
    assert list(two.take_pieces()) == [0]


def test_post_says_why_the_connection_has_ended() -> None:
    """In one line."""
    zero, _ = posts()
    assert zero.fault == ""
    zero.break_off(RuntimeError("Broken pipe\nException raised from sendBytes"))
    assert zero.fault == "Broken pipe"
