# SPDX-License-Identifier: Apache-2.0
"""Where the store of a job is, and who hosts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpilot.environments.alone import alone
from ddpilot.environments.topology import Topology
from ddpilot.errors import RendezvousError
from ddpilot.group.store import Endpoint, resolve_endpoint

RANK_0 = Topology(
    rank=0,
    local_rank=0,
    world_size=2,
    local_world_size=2,
    node_rank=0,
    nnodes=1,
    master_addr="node1",
    master_port=29501,
    environment="torchrun",
    how="a test",
)


def test_resolve_endpoint_lets_rank_0_host_the_store() -> None:
    """Without an agent, rank 0 hosts and the others connect."""
    assert resolve_endpoint(RANK_0, {}) == Endpoint("node1", 29501, True, "ddpilot/run/0")
    assert resolve_endpoint(replace(RANK_0, rank=1, local_rank=1), {}).hosted_here is False


def test_resolve_endpoint_lets_no_rank_host_when_an_agent_does() -> None:
    """Under a launcher's agent every rank is a client, and each of its restarts has its own keys."""
    environ = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    assert resolve_endpoint(RANK_0, environ) == Endpoint("node1", 29501, False, "ddpilot/job7/2")


def test_resolve_endpoint_refuses_a_topology_without_an_address() -> None:
    """Alone there is nowhere to meet."""
    with pytest.raises(RendezvousError, match="MASTER_ADDR=None, MASTER_PORT=None"):
        resolve_endpoint(alone("a test"), {})
