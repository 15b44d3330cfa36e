# SPDX-License-Identifier: Apache-2.0
"""Give gloo's threads time before a process group or the process ends; it can otherwise hang or abort (torch 2.13).

The thread that completed a collective releases its tensors afterwards, and needs the GIL for tensors that Python has
seen.

- A group's destructor waits for those threads while it holds the GIL. This happens if a DDP model outlives its
  destroyed group, as at the end of a training function: 18 of 40 scripts on a busy machine, none of 40 with the pause.
- A process that exits with its group in use makes Python terminate such a thread, and C++ then aborts ("terminate
  called without an active exception", SIGABRT): 9 of 22 scripts of two ranks.
"""

from __future__ import annotations

import atexit
import time
from functools import wraps
from typing import Any

_NUM_PAUSES, _PAUSE_S = 10, 0.001
"""Each pause releases the GIL to waiting threads."""

_MARK = "_ddpilot_lets_works_end"


def let_works_end() -> None:
    """Make `destroy_process_group` and this process's exit wait for gloo's threads. A second call does nothing."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    destroy = c10d.destroy_process_group
    if hasattr(destroy, _MARK):
        return

    @wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        kept = tuple(c10d._world.pg_map)  # otherwise the destructor may run in the next line
        destroy(group)
        _pause()
        del kept

    def pause_at_exit() -> None:
        if dist.is_initialized():
            _pause()

    setattr(destroy_process_group, _MARK, True)
    c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group
    atexit.register(pause_at_exit)


def _pause() -> None:
    for _ in range(_NUM_PAUSES):
        time.sleep(_PAUSE_S)
