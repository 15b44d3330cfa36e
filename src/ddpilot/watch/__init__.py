# SPDX-License-Identifier: Apache-2.0
"""What ranks left, seen from outside and said in findings. Free of torch.

`view` holds what was gathered, `stall` and `rules` say what it means, `observer` looks again and again, `watcher` goes
along with a launch. For scripts that torchrun or srun starts there is `enable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpilot.watch.enabling import enable

__all__ = ["enable"]


def __getattr__(name: str) -> object:
    if name != "enable":
        raise AttributeError(f"module 'ddpilot.watch' has no attribute {name!r}")
    from ddpilot.watch.enabling import enable

    return enable
