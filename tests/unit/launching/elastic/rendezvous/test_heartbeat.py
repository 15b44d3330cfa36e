# SPDX-License-Identifier: Apache-2.0
"""Notices and errors about nodes that send no heartbeats."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ddpilot.errors import RendezvousError
from ddpilot.launching.elastic.rendezvous.heartbeat import LivenessCheck, Standstill, silent_nodes
from ddpilot.launching.elastic.rendezvous.node_state import DONE, NodeState, NodesView

ONE = NodeState(node_rank=1, host="other", pid=7, nnodes=2, nproc_per_node=1, target="train.py")


def view(silent_s: float, state: NodeState = ONE) -> NodesView:
    """The view of node 0 if node 1 has been silent for `silent_s`."""
    return NodesView(states={1: state}, silent_s={1: silent_s})


def test_liveness_check_says_silence_once_and_its_end() -> None:
    """One notice after 5 s, one when the node is back, and none in between."""
    said: list[str] = []
    check = LivenessCheck(30.0, said.append, Standstill())
    for silent_s in (0.5, 4.9, 5.0, 9.0, 12.0, 0.2, 0.4):
        check.look(view(silent_s))
    assert said == [
        (
            "no heartbeat from node 1 (other) for 5 s: is the network or that machine down? "
            "Ranks here are terminated in 25 s (--node-timeout 30)"
        ),
        "node 1 (other) is back after 12 s",
    ]


def test_liveness_check_ends_it_after_the_limit() -> None:
    """The node, the time and the option are in the error."""
    with pytest.raises(RendezvousError, match="watching node 1 .other.: no heartbeat for 31 s.*--node-timeout"):
        LivenessCheck(30.0, print, Standstill()).look(view(31.0))


def test_liveness_check_expects_no_sign_of_a_node_that_is_done() -> None:
    """A node that has left sends no heartbeats."""
    LivenessCheck(30.0, print, Standstill()).look(view(99.0, replace(ONE, phase=DONE)))


def test_liveness_check_names_node_zero_when_its_store_ends() -> None:
    """The connection's own error is chained; an error of ddpilot's is raised as it is."""
    broken = RuntimeError("Broken pipe\nframe #0: ...")
    with pytest.raises(
        RendezvousError, match="keeping the connection to node 0: its store is gone .Broken pipe."
    ) as caught:
        LivenessCheck(30.0, print, Standstill()).look(NodesView(link_error=broken))
    assert caught.value.__cause__ is broken
    twin = RendezvousError("joining as node 1", found="somebody is")
    with pytest.raises(RendezvousError) as raised:
        LivenessCheck(30.0, print, Standstill()).look(NodesView(link_error=twin))
    assert raised.value is twin


def test_silent_nodes_are_those_that_have_not_left() -> None:
    """A node that has left is not silent."""
    assert silent_nodes(view(3.0), 2.5) == [ONE]
    assert silent_nodes(view(2.0), 2.5) == []
    assert silent_nodes(view(9.0, replace(ONE, phase=DONE)), 2.5) == []


def test_liveness_check_does_not_blame_the_other_node_after_this_process_stood_still() -> None:
    """One notice, and two seconds for the thread that reads the other nodes' heartbeats."""
    said: list[str] = []
    standstill = Standstill()
    check = LivenessCheck(30.0, said.append, standstill)
    now = time.monotonic()
    for moment in (now - 40.0, now - 39.75, now):
        standstill.tick(moment)
    for _ in range(2):
        check.look(view(39.0))
    standstill.ended_s -= 2.0
    with pytest.raises(RendezvousError, match="no heartbeat for 41 s"):
        check.look(view(41.0))
    assert len(said) == 1
    assert said[0].startswith("`ddpilot run` on this node was not running for 40 s: was it stopped")
