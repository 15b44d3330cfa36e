# SPDX-License-Identifier: Apache-2.0
"""``ddpilot topology``: show the rank, sizes and addresses of this process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from ddpilot.environments.detect import detect_topology


def describe_topology(*, as_json: bool = False) -> str:
    """The topology that `detect_topology` finds in this process's environment, as a table or one JSON object.

    Raises `TopologyError` if the environment is incomplete or inconsistent.
    """
    topology = detect_topology(os.environ)
    return json.dumps(asdict(topology), indent=2) if as_json else str(topology)
