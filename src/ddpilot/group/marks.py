# SPDX-License-Identifier: Apache-2.0
"""Entries of a group's members in the group's own store. torch keeps that store alive, so ddpilot keeps no state."""

from __future__ import annotations

import json
from dataclasses import asdict

from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from ddpilot.group.members import Member


def mark_entered(me: Member) -> None:
    """Write `me` to the store of the default group, which ddpilot has just created."""
    c10d._get_default_store().set(_key(me.rank), json.dumps(asdict(me)))


def read_member(store: Store, rank: int) -> Member | None:
    """The entry that `rank` wrote to `store`, the store of its group; None if it wrote none."""
    if not store.check([_key(rank)]):
        return None
    return Member(**json.loads(store.get(_key(rank))))


def _key(rank: int) -> str:
    return f"ddpilot/member/{rank}"
