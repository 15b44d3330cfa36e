# SPDX-License-Identifier: Apache-2.0
"""Watch a job from outside its ranks and report why they do not progress. Imports `guard`, `launching` and below.

`snapshot` reads the state of the ranks, `matching` lines up their collectives, `explain` turns errors and waits
into findings, `analysis` is the entry to both, and `observer` repeats this while the job runs. `companion` attaches an
observer to a launch; `external` and `enable` are for ranks that torchrun or srun starts, `nodes` for several nodes.
Only the setup in ranks imports torch.
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
