# SPDX-License-Identifier: Apache-2.0
"""The topology of a process that is not part of a job."""

from __future__ import annotations

from ddpilot.environments.topology import Topology


def alone(how: str) -> Topology:
    """Rank 0 of 1, without a master address. `how`: the sentence that explains why."""
    return Topology(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        nnodes=1,
        master_addr=None,
        master_port=None,
        environment="alone",
        how=how,
    )
