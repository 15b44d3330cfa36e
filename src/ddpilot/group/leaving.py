# SPDX-License-Identifier: Apache-2.0
"""Leave a process group without hanging: wait for healthy peers for a while, then take the group down."""

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
    """Tell the peers that this rank leaves and wait until they do too; True once all of them have.

    Collective in spirit, but never waits longer than `limit_s` seconds, and not for a peer whose process of this host
    is known to have ended, nor where the store is gone.
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
        return False  # the store went with the rank that hosted it, or was freed: there is no one to wait for


def _any_gone(store: Store, ranks: list[int]) -> bool:
    members = (read_member(store, rank) for rank in ranks)
    return any(member is not None and member.is_gone() for member in members)


def take_down(healthy: bool) -> Freed:
    """Destroy the default group and all others of this process; `healthy`: did every rank come to this point?

    With unhealthy peers the groups are freed first, since operations in flight would be waited for otherwise. Returns
    what was freed.
    """
    freed = Freed() if healthy else free_group()
    if dist.is_initialized():
        dist.destroy_process_group()
    allow_steps()
    # An attempt that failed has counted too, and torch names a group's keys by that count: ranks would miss each other.
    c10d._world.group_count = 0
    # A DDP model keeps the old group alive and would go on using it, silently: its next step fails instead.
    shut(find_gloo_sockets())
    return freed
