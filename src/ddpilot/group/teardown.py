# SPDX-License-Identifier: Apache-2.0
"""Leave a process group without hanging: wait a limited time for healthy peers, then destroy the group."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from ddpilot.group.free import Freed, allow_steps, free_group
from ddpilot.group.marks import read_member
from ddpilot.group.sockets import find_gloo_sockets, shut
from ddpilot.group.waiting import came

_SLICE_S = 0.1


def wait_for_peers(rank: int, world_size: int, limit_s: float) -> bool:
    """Announce to the peers that this rank leaves and wait until they leave too. Returns True if all of them have.

    All ranks should call it, but it never waits longer than `limit_s` seconds, nor for a peer whose process on this
    host is known to have exited, nor if the store is gone.
    """
    store = c10d._get_default_store()
    keys = [f"ddpilot/leaving/{peer}" for peer in range(world_size)]
    deadline = time.monotonic() + limit_s
    try:
        store.set(keys[rank], "")
        while True:
            if came(store, keys, _SLICE_S):
                return True
            awaited = [peer for peer, key in enumerate(keys) if not store.check([key])]
            if time.monotonic() > deadline or _any_gone(store, awaited):
                return False
    except RuntimeError:
        return False  # the store was freed or ended with the rank that hosted it: no peer can answer


def _any_gone(store: Store, ranks: list[int]) -> bool:
    members = (read_member(store, rank) for rank in ranks)
    return any(member is not None and member.is_gone() for member in members)


def take_down(healthy: bool) -> Freed:
    """Destroy all process groups of this process. `healthy`: True if every rank has reached this point.

    If not, the groups are freed first, because destroying them would wait for operations in progress. Returns what was
    freed.
    """
    freed = Freed() if healthy else free_group()
    if dist.is_initialized():
        dist.destroy_process_group()
    allow_steps()
    # torch names a group's keys by this count; failed attempts count too, so ranks could otherwise disagree on it.
    c10d._world.group_count = 0
    # A DDP model keeps the old group alive and would silently continue to use it: make its next step fail instead.
    shut(find_gloo_sockets())
    return freed
