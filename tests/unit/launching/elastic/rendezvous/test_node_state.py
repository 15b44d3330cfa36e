# SPDX-License-Identifier: Apache-2.0
"""States and errors that nodes exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore

from ddpilot.errors import LaunchError, RankError, RendezvousError, WatchError
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.launching.elastic.options import RunStoppedError
from ddpilot.launching.elastic.rendezvous.node_state import (
    NUM_SLOTS,
    NodeState,
    StoreMailbox,
    asks_for_requeue,
    check_agreement,
    decode_state,
    pack_error,
    render_nodes,
    unpack_error,
    with_failure,
)

ZERO = NodeState(node_rank=0, host="here", pid=7, nnodes=2, nproc_per_node=1, target="train.py", attempt=3)
FAILED = RankError(
    "running `train.py` on 2 ranks",
    found="rank 1 raised ValueError: bad",
    rank=1,
    host="there",
    rank_traceback="Traceback ...",
    last_lines=("a", "b"),
    others="Rank 0 failed as a result.",
)


def test_node_state_survives_the_store() -> None:
    """With the failure that it carries, of the attempt that it is in."""
    state = with_failure(ZERO, FAILED)
    assert decode_state(state.encode()) == decode_state(decode_state(state.encode()).encode())
    assert decode_state(state.encode()).failed_attempt == 3


def test_unpack_error_is_the_other_nodes_error_with_what_became_of_this_one() -> None:
    """Rank, host and traceback are the other node's."""
    error = unpack_error(with_failure(ZERO, FAILED).failure or {}, "On this node, rank 0 terminated.")
    assert isinstance(error, RankError)
    assert (error.rank, error.host, error.last_lines) == (1, "there", ("a", "b"))
    assert str(error).endswith("On this node, rank 0 terminated.")
    plain = unpack_error(pack_error(LaunchError("doing", found="that", fix="This")), "")
    assert str(plain) == "doing: that. This"


@pytest.mark.parametrize(("exitcode", "expected"), [(75, True), (1, False)])
def test_asks_for_requeue_reads_the_exit_code_of_the_other_node(exitcode: int, expected: bool) -> None:
    """Of ranks that left by themselves and of a node that a signal stopped; its own exit code is decided here."""
    stopped = RunStoppedError("running", found="stopped by SIGTERM", exitcode=exitcode)
    left = RankError("running", found="rank 0 left", rank=0, host="there", exitcode=exitcode)
    failures = [decode_state(with_failure(ZERO, error).encode()).failure or {} for error in (stopped, left)]
    assert [asks_for_requeue(failure) for failure in failures] == [expected, expected]
    assert type(unpack_error(failures[0], "")) is LaunchError


def test_unpack_error_has_the_findings_of_the_other_node() -> None:
    """A RankError and a WatchError; the fix of the latter names its machine."""
    found = Findings([Finding(code="DDP201", name="desync", severity="error", ranks=(0, 1))])
    failed = RankError("running", found="rank 1 died", rank=1, host="there")
    failed.findings = found
    watched = WatchError("running", found="desync", fix="`ddpilot watch 7` shows it", findings=found)
    for error, kind in ((failed, RankError), (watched, WatchError)):
        state = decode_state(with_failure(ZERO, error).encode())
        assert state.failure is not None
        other = unpack_error(state.failure, "")
        assert type(other) is kind
        assert other.findings == found
    assert "`ddpilot watch 7` shows it on node 0 (here)" in str(other)


def test_render_nodes_has_hosts_where_they_are_known() -> None:
    """In order of their numbers."""
    assert render_nodes({2, 0}, {0: ZERO}) == "node 0 (here), node 2"


def test_check_agreement_names_both_when_they_were_started_differently() -> None:
    """A node with a different number of nodes would wait forever."""
    other = replace(ZERO, node_rank=1, host="there", nnodes=3)
    check_agreement(ZERO, {0: ZERO})
    with pytest.raises(RendezvousError, match="node 0 .here. has --nnodes 2, node 1 .there. has --nnodes 3"):
        check_agreement(ZERO, {0: ZERO, 1: other})
    restarts = replace(ZERO, node_rank=1, host="there", max_restarts=2)
    with pytest.raises(RendezvousError, match="has --max-restarts 0, node 1 .there. has --max-restarts 2. Start every"):
        check_agreement(ZERO, {0: ZERO, 1: restarts})


FIRST = NodeState(node_rank=0, host="here", pid=7, nnodes=2, nproc_per_node=1, target="train.py", attempt=0)
ONE = replace(FIRST, node_rank=1, host="there")


def exchange(store: HashStore, zero: StoreMailbox, one: StoreMailbox) -> None:
    """What the threads with the connections do, node 1 first."""
    num_messages, num_chunks = one.send(store)
    states = [replace(ONE, num_messages=num_messages, num_chunks=num_chunks, attempt=one.attempt)]
    zero.send(store)
    zero.fetch(store, states, 5_000_000_000)


def mailboxes(attempt: int = 0) -> tuple[StoreMailbox, StoreMailbox]:
    """Of both nodes."""
    return StoreMailbox(FIRST, attempt, lambda: None), StoreMailbox(ONE, attempt, lambda: None)


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
    for state in (FIRST, ONE):
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
