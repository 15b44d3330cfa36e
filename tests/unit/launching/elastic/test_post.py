# SPDX-License-Identifier: Apache-2.0
"""Letters between nodes: what is read when, and what of an earlier attempt is not."""

from __future__ import annotations

from dataclasses import replace

from torch._C._distributed_c10d import HashStore

from ddpilot.launching.elastic.nodes import NodeState
from ddpilot.launching.elastic.post import Post

ZERO = NodeState(node_rank=0, host="here", pid=7, nnodes=2, nproc_per_node=1, target="train.py")
ONE = replace(ZERO, node_rank=1, host="there")


def exchange(store: HashStore, zero: Post, one: Post) -> None:
    """What the threads with the connections do, node 1 first."""
    states = [replace(ONE, letter=one.send(store), attempt=one.attempt)]
    zero.send(store)
    zero.fetch(store, states, 5_000_000_000)


def posts(attempt: int = 0) -> tuple[Post, Post]:
    """Of both nodes."""
    return Post(ZERO, attempt, lambda: None), Post(ONE, attempt, lambda: None)


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


def test_post_says_why_the_connection_has_ended() -> None:
    """In one line."""
    zero, _ = posts()
    assert zero.fault == ""
    zero.break_off(RuntimeError("Broken pipe\nException raised from sendBytes"))
    assert zero.fault == "Broken pipe"
