# SPDX-License-Identifier: Apache-2.0
"""Where the observers of several nodes meet, by what their launcher said."""

from __future__ import annotations

import json

from ddpilot.environments.detect import detect_topology
from ddpilot.watch.external.rank_process import describe_connection
from tests.unit.environments.torchrun_variables import COMPLETE

ONE_OF_FOUR = {**COMPLETE, "TORCHELASTIC_RESTART_COUNT": "2"}


def test_describe_way_names_the_store_of_the_ranks_and_this_node() -> None:
    """A restart has letters of its own; all of it goes to another process as JSON."""
    way = describe_connection(detect_topology(ONE_OF_FOUR), "train.py", ONE_OF_FOUR)
    assert way == json.loads(json.dumps(way))
    assert way is not None
    assert (way["node_rank"], way["nnodes"], way["addr"], way["port"]) == (1, 2, "n1", 29501)
    assert (way["attempt"], way["run_id"]) == (2, "17")


def test_describe_way_is_none_where_there_is_one_node() -> None:
    """Its observer sees all ranks: nobody opens a connection."""
    alone = {**ONE_OF_FOUR, "RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    assert describe_connection(detect_topology(alone), "train.py", alone) is None
