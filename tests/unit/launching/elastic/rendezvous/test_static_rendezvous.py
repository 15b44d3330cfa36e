# SPDX-License-Identifier: Apache-2.0
"""When the static rendezvous considers all nodes ready, and with which port."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore

from ddpilot.errors import RendezvousError
from ddpilot.launching.elastic.rendezvous.heartbeat import Heartbeat
from ddpilot.launching.elastic.rendezvous.network import Endpoint
from ddpilot.launching.elastic.rendezvous.node_state import NodeState
from ddpilot.launching.elastic.rendezvous.static_rendezvous import StaticRendezvousHandler

ZERO = NodeState(node_rank=0, host="here", pid=7, nnodes=2, nproc_per_node=1, target="train.py")
ONE = replace(ZERO, node_rank=1, host="there")


def test_a_node_is_ready_only_after_it_has_published_the_port_of_the_ranks_store() -> None:
    """The first heartbeat may reach the store before that: ranks connected to port 0 until they timed out."""
    store = HashStore()
    store.set("node/1", replace(ONE, attempt=0).encode())
    rendezvous = StaticRendezvousHandler(
        Endpoint(addr="here", port=29500), ZERO, run_id="", timeout_s=0.0, node_timeout_s=60.0, note=print
    )
    rendezvous._attempt = 0
    heartbeat = Heartbeat(lambda: store, ZERO)
    try:
        heartbeat.flush(10.0)
        with pytest.raises(RendezvousError, match=r"node 0 \(here\) did not join within 0 s; joined: node 1"):
            rendezvous._wait_for_all(heartbeat)
        heartbeat.update(lambda me: replace(me, attempt=0, ranks_port=29500))
        heartbeat.flush(10.0)
        assert rendezvous._wait_for_all(heartbeat).states[0].ranks_port == 29500
    finally:
        heartbeat.stop()
        rendezvous._standstill.stop()
