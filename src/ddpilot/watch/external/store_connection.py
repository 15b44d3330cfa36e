# SPDX-License-Identifier: Apache-2.0
"""Connect the observers of several nodes if a launcher other than ddpilot started the ranks."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddpilot.environments.topology import Topology
from ddpilot.launching.elastic.rendezvous.heartbeat import Heartbeat
from ddpilot.launching.elastic.rendezvous.mailbox import StoreMailbox
from ddpilot.launching.elastic.rendezvous.node_state import NodeState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PULSE_S = 1.0
_FLUSH_S = 1.0
_CONNECT_LIMIT = timedelta(hours=1)
_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"


def describe_connection(topology: Topology, name: str, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of `StoreConnection` as JSON-serializable values; None if there is only one node."""
    if topology.nnodes == 1:
        return None
    return {
        "node_rank": topology.node_rank,
        "nnodes": topology.nnodes,
        "nproc_per_node": topology.local_world_size,
        "target": name,
        "attempt": int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "run_id": environ.get("TORCHELASTIC_RUN_ID", ""),
        "addr": topology.master_addr,
        "port": topology.master_port,
    }


class StoreConnection:
    """The connection to the observers of the other nodes, through the store of the ranks.

    `arguments`: from `describe_connection`. A separate thread waits for that store and holds the only connection to it.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        mine = {name: arguments[name] for name in ("node_rank", "nnodes", "nproc_per_node", "target", "attempt")}
        me = NodeState(host=platform.node(), pid=os.getpid(), **mine)
        self._peers = Heartbeat(self._connect, me, pulse_s=_PULSE_S)
        self.post: StoreMailbox = self._peers.open_mailbox(me.attempt)

    def close(self) -> None:
        """Wait at most one second for pending writes to reach the store, then disconnect."""
        self._peers.flush(_FLUSH_S)
        self._peers.stop()

    def _connect(self) -> Store:
        os.environ.setdefault(_LEVEL_VARIABLE, "ERROR")  # else torch logs host names that do not resolve
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        to = self._arguments
        store = TCPStore(to["addr"], to["port"], is_master=False, timeout=_CONNECT_LIMIT, wait_for_workers=False)
        return PrefixStore(f"ddpilot-watch/{to['run_id']}/{to['attempt']}", store)
