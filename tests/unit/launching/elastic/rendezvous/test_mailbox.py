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
    num_messages, num_chunks = one.send(store)
    states = [replace(ONE, num_messages=num_messages, num_chunks=num_chunks, attempt=one.attempt)]
    zero.send(store)
    zero.fetch(store, states, 5_000_000_000)


def mailboxes(attempt: int = 0) -> tuple[StoreMailbox, StoreMailbox]:
    """Of both nodes."""
    return StoreMailbox(ZERO, attempt, lambda: None), StoreMailbox(ONE, attempt, lambda: None)


def test_post_carries_the_newest_letter_and_says_between_which_moments_it_was_written() -> None:
    """What was written before that is gone; nothing is read twice."""
    store = HashStore()
    zero, one = mailboxes()
    exchange(store, zero, one)
    assert zero.messages == {}
    assert zero.places == {1: "node 1 (there)"}
    one.write("first")
    one.write("second")
    exchange(store, zero, one)
    message = zero.messages[1]
    assert (message.text, message.number, message.after_ns) == ("second", 2, 4_000_000_000)
    assert message.before_ns > message.after_ns
    exchange(store, zero, one)
    assert zero.messages[1] is message


def test_post_is_busy_only_after_letters() -> None:
    """An idle mailbox does not use the connection."""
    store = HashStore()
    zero, one = mailboxes()
    exchange(store, zero, one)
    assert [zero.is_busy, one.is_busy] == [False, False]
    one.write("news")
    exchange(store, zero, one)
    assert [zero.is_busy, one.is_busy] == [True, True]


def test_post_of_a_restart_reads_nothing_of_the_attempt_before() -> None:
    """Another node may not have seen yet that it is over."""
    store = HashStore()
    _, one = mailboxes()
    one.write("old")
    zero, _ = mailboxes(attempt=1)
    exchange(store, zero, one)
    assert zero.messages == {}


def test_post_carries_each_piece_once_and_in_order() -> None:
    """Any number may be appended between two exchanges; it does not make the mailbox busy."""
    store = HashStore()
    zero, one = mailboxes()
    read = []
    for texts in (["a"], [], ["b c", "d"]):
        for text in texts:
            one.append(text)
        exchange(store, zero, one)
        read.append([(chunk.text, chunk.number) for chunk in zero.take_chunks().get(1, ())])
    assert read == [[("a", 1)], [], [("b c", 2), ("d", 3)]]
    assert not one.is_busy


def test_post_shows_by_the_numbers_that_pieces_were_overwritten() -> None:
    """Nobody had read them: the store keeps as many as it has slots."""
    store = HashStore()
    zero, one = mailboxes()
    for number in range(NUM_SLOTS):
        one.append(str(number))
    one.send(store)
    one.append("one more")
    exchange(store, zero, one)
    assert [chunk.number for chunk in zero.take_chunks()[1]] == list(range(2, NUM_SLOTS + 2))
    assert store.num_keys() == NUM_SLOTS


def test_post_of_node_1_reads_the_pieces_of_node_0_alone() -> None:
    """Those of other nodes are for node 0."""
    store = HashStore()
    two = StoreMailbox(replace(ONE, node_rank=2, nnodes=3), 0, lambda: None)
    states = []
    for state in (ZERO, ONE):
        mailbox = StoreMailbox(state, 0, lambda: None)
        mailbox.append("news")
        states.append(replace(state, num_chunks=mailbox.send(store)[1]))
    two.fetch(store, states, 5_000_000_000)
    assert list(two.take_chunks()) == [0]


def test_post_says_why_the_connection_has_ended() -> None:
    """In one line."""
    zero, _ = mailboxes()
    assert zero.fault == ""
    zero.break_off(RuntimeError("Broken pipe\nException raised from sendBytes"))
    assert zero.fault == "Broken pipe"
