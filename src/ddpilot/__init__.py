# SPDX-License-Identifier: Apache-2.0
"""Train with DistributedDataParallel from a notebook, a script or Slurm with the same function and the same numbers.

The public names are declared here, once, and resolve on first use: importing ddpilot loads neither torch nor IPython
and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpilot.api.launch import Launcher, launch
    from ddpilot.errors import (
        DdpilotError,
        GroupError,
        LaunchError,
        LaunchInterrupted,
        LaunchTimeoutError,
        RankError,
        RemoteRankError,
        RendezvousError,
        ShipError,
        TopologyError,
    )
    from ddpilot.launching.results import RankResults

_HOMES = {
    "DdpilotError": "ddpilot.errors",
    "GroupError": "ddpilot.errors",
    "LaunchError": "ddpilot.errors",
    "LaunchInterrupted": "ddpilot.errors",
    "LaunchTimeoutError": "ddpilot.errors",
    "Launcher": "ddpilot.api.launch",
    "RankError": "ddpilot.errors",
    "RankResults": "ddpilot.launching.results",
    "RemoteRankError": "ddpilot.errors",
    "RendezvousError": "ddpilot.errors",
    "ShipError": "ddpilot.errors",
    "TopologyError": "ddpilot.errors",
    "launch": "ddpilot.api.launch",
}

__all__ = [
    "DdpilotError",
    "GroupError",
    "LaunchError",
    "LaunchInterrupted",
    "LaunchTimeoutError",
    "Launcher",
    "RankError",
    "RankResults",
    "RemoteRankError",
    "RendezvousError",
    "ShipError",
    "TopologyError",
    "launch",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpilot' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
