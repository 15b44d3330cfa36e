# SPDX-License-Identifier: Apache-2.0
"""What ddpilot writes into a group's own store: who is in it. torch keeps that store, so nothing else has to."""

from __future__ import annotations

import json
from dataclasses import asdict

from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from ddpilot.group.roster import Member


def mark_entered(me: Member) -> None:
    """Write `me` into the store of the default group, which ddpilot has just made."""
    c10d._get_default_store().set(_key(me.rank), json.dumps(asdict(me)))


def read_member(store: Store, rank: int) -> Member | None:
    """What `rank` wrote into `store`, the store of its group; None where it wrote nothing."""
    if not store.check([_key(rank)]):
        return None
    return Member(**json.loads(store.get(_key(rank))))


def _key(rank: int) -> str:
    return f"ddpilot/member/{rank}"
