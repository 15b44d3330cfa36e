# SPDX-License-Identifier: Apache-2.0
"""Watch a job from outside its ranks and report what is wrong as findings. Does not import torch.

`view` holds the state that was gathered, `stall` and `rules` analyze it, `observer` repeats this while the job runs,
and `watcher` attaches an observer to a launch. `enable` is for scripts that torchrun or srun starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpilot.watch.external.instrumentation import enable

__all__ = ["enable"]


def __getattr__(name: str) -> object:
    if name != "enable":
        raise AttributeError(f"module 'ddpilot.watch' has no attribute {name!r}")
    from ddpilot.watch.external.instrumentation import enable

    return enable
