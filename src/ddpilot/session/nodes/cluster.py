# SPDX-License-Identifier: Apache-2.0
"""`make_cluster`: choose how the hosts of a session are started."""

from __future__ import annotations

from collections.abc import Callable

from ddpilot.session.nodes.node_ranks import Cluster
from ddpilot.session.nodes.ssh import SshCluster
from ddpilot.session.options import SessionOptions


def make_cluster(options: SessionOptions, note: Callable[[str], None]) -> Cluster | None:  # noqa: ARG001
    """Return what starts the hosts of a session; None if its ranks run on this machine."""
    if options.hosts:
        return SshCluster(options.hosts)
    return None
