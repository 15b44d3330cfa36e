# SPDX-License-Identifier: Apache-2.0
"""Make the allocator refuse what the machine does not have, where the system would end the process instead."""

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
"""A container's limit and what it uses, of version 2 and 1: what the machine has free may be more."""


@contextmanager
def limited_memory(group: GroupLike) -> Iterator[None]:
    """In the body this process gets no more than its part of the memory that is free now, on the CPU of Linux.

    Beyond it allocations fail as they do where memory is really gone. A limit that is set already stays where it is
    lower. Does nothing on other devices and systems. Not collective.
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
    """Memory that is free for new allocations on this machine, or in this container where that is less."""
    free: int = psutil.virtual_memory().available
    for limit, used in _CGROUPS:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such version, or "max"
            continue
        free = min(free, max(left, 0))
    return free
