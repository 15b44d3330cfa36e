# SPDX-License-Identifier: Apache-2.0
"""Train with DistributedDataParallel from a notebook, a script or Slurm with the same function and the same numbers.

The public names are declared here, once, and resolve on first use: importing ddpilot loads neither torch nor IPython
and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpilot.errors import (
        DdpilotError,
        GroupError,
        LaunchError,
        RemoteRankError,
        RendezvousError,
        ShipError,
        TopologyError,
    )

_HOMES = {
    "DdpilotError": "ddpilot.errors",
    "GroupError": "ddpilot.errors",
    "LaunchError": "ddpilot.errors",
    "RemoteRankError": "ddpilot.errors",
    "RendezvousError": "ddpilot.errors",
    "ShipError": "ddpilot.errors",
    "TopologyError": "ddpilot.errors",
}

__all__ = [
    "DdpilotError",
    "GroupError",
    "LaunchError",
    "RemoteRankError",
    "RendezvousError",
    "ShipError",
    "TopologyError",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpilot' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
