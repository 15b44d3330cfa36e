# SPDX-License-Identifier: Apache-2.0
"""`make_cluster`: choose how the hosts of a session are started."""

from __future__ import annotations

from collections.abc import Callable

from ddpilot.session.nodes.node_ranks import Cluster
from ddpilot.session.nodes.slurm import SlurmCluster, SlurmRequest
from ddpilot.session.nodes.ssh import SshCluster
from ddpilot.session.options import SessionOptions


def make_cluster(options: SessionOptions, note: Callable[[str], None]) -> Cluster | None:
    """Return what starts the hosts of a session; None if its ranks run on this machine."""
    if options.hosts:
        return SshCluster(options.hosts)
    if options.slurm:
        request = SlurmRequest(
            num_nodes=options.nodes, gpus_per_node=options.gpus_per_node, options=options.slurm_options
        )
        return SlurmCluster(request, note)
    return None
