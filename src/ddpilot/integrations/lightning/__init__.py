# SPDX-License-Identifier: Apache-2.0
"""Lightning (also `pytorch_lightning`): registers the strategy "ddpilot" on import. Imports `launcher` and below.

`Trainer(devices=2, strategy="ddpilot")` and `Fabric(devices=2, strategy="ddpilot")` then start their ranks from
ddpilot's rank server, also in a notebook that has used torch or CUDA. The order of the imports does not matter, and
this module imports neither Lightning nor torch.

In a session, the app "lightning" lets a `Trainer` or `Fabric` with the arguments for one process run on all ranks.
"""

from __future__ import annotations

from typing import Any

from ddpilot.integrations.lightning.registry import register, use_for_notebooks

__all__ = ["DdpilotFabricStrategy", "DdpilotStrategy", "RanksStopped", "use_for_notebooks"]


def __getattr__(name: str) -> Any:
    if name == "RanksStopped":
        from ddpilot.integrations.lightning.strategies import RanksStopped

        return RanksStopped
    if name in ("DdpilotStrategy", "DdpilotFabricStrategy"):
        from ddpilot.integrations.lightning.strategies import default_strategy_class

        return default_strategy_class(for_fabric=name == "DdpilotFabricStrategy")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")


register()
