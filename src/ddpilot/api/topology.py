# SPDX-License-Identifier: Apache-2.0
"""`topology()`: who this process is in a distributed job."""

from __future__ import annotations

import os

from ddpilot.environments.detect import detect_topology
from ddpilot.environments.topology import Topology


def topology(distributed: bool | None = None) -> Topology:
    """Rank, sizes and address of this process, and how they were found; reads the environment variables once.

    `distributed`: True insists on a distributed environment, False says alone whatever is set, None (default) detects,
    as DDPILOT_DISTRIBUTED may decide. Raises TopologyError, which names the variable, when variables contradict each
    other or one is missing. Not collective; loads no torch.
    """
    return detect_topology(os.environ, distributed=distributed)
