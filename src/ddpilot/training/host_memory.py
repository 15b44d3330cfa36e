# SPDX-License-Identifier: Apache-2.0
"""Limits a process to its share of the free host memory, so that allocations fail before the OOM killer acts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ddpilot.group.protocol import GroupLike

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with a container's memory limit and usage, of cgroup v2 and v1: the machine may have more free memory."""


@contextmanager
def limited_memory(group: GroupLike) -> Iterator[None]:
    """Limit this process, in the block, to its share of the memory that is free now. Linux CPU ranks only.

    Further allocations fail as if memory were exhausted. A lower limit that is already set is kept. Does nothing on
    other devices and systems. Not collective.
    """
    if group.device.type != "cpu" or sys.platform != "linux":
        yield
        return
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + available_bytes() // group.local_world_size
    limits = [limit, *(given for given in (soft, hard) if given != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def available_bytes() -> int:
    """Return the memory available for new allocations on this machine or in this container, whichever is less."""
    free: int = psutil.virtual_memory().available
    for limit, used in _CGROUPS:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such cgroup version, or "max"
            continue
        free = min(free, max(left, 0))
    return free
