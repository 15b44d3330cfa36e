# SPDX-License-Identifier: Apache-2.0
"""`topology()`: rank, sizes and addresses of this process."""

from __future__ import annotations

import os

from ddpilot.environments.detect import detect_topology
from ddpilot.environments.topology import Topology


def topology(distributed: bool | None = None) -> Topology:
    """Rank, sizes and address of this process, and how they were detected; reads the environment variables once.

    `distributed`: True requires a launcher's environment, False ignores it, None (default) detects it unless
    DDPILOT_DISTRIBUTED is set. Raises TopologyError, which names the variable, if variables contradict each other or
    one is missing. Not collective; does not import torch.
    """
    return detect_topology(os.environ, distributed=distributed)
