# SPDX-License-Identifier: Apache-2.0
"""`ddpilot topology`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from ddpilot.environments.detect import detect_topology


def describe_topology(*, as_json: bool = False) -> str:
    """What `detect_topology` finds in this process's environment, as a table or as one JSON object.

    Raises `TopologyError` where the environment is incomplete or contradicts itself.
    """
    topology = detect_topology(os.environ)
    return json.dumps(asdict(topology), indent=2) if as_json else str(topology)
