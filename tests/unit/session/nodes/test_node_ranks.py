# SPDX-License-Identifier: Apache-2.0
"""What the parent of ranks on other machines makes of their ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from ddpilot.launching.spawning import SERVER_GONE, Ended
from ddpilot.session.nodes.node_ranks import NodeRanks


def test_a_node_without_its_rank_server_is_lost_at_once() -> None:
    """Before its host has closed the connection: a restart starts that host again, whenever it comes."""
    node: Any = SimpleNamespace(
        name="b", node_rank=1, is_lost=False, was_lost=False, link=SimpleNamespace(fileno=lambda: 7, lost="")
    )
    node.placement = SimpleNamespace(ranks=(1, 2))
    emitted: list[Ended] = []
    ranks: Any = NodeRanks.__new__(NodeRanks)
    ranks._emit, ranks._loop = emitted.append, SimpleNamespace(unwatch=lambda fd: None)
    ranks._cluster = SimpleNamespace(describe_job_end=lambda: "")
    ranks._asking, ranks._asked, ranks._by_rank, ranks.world_size = threading.Lock(), {}, {1: node}, 3
    ranks.nodes, ranks._live, ranks._job_end = [node], {0: 10, 1: 11, 2: 12}, ""
    for rank in (1, 2):
        ranks._on_event(node, Ended(rank, None, SERVER_GONE))
    assert node.is_lost
    assert [(each.rank, each.reason) for each in emitted] == [
        (rank, "was lost with node b, which has no rank server any more") for rank in (1, 2)
    ]
    loss = ranks.find_loss(1)
    assert loss is not None
    assert loss.text == "ranks 1,2 were lost with node b, which has no rank server any more"
