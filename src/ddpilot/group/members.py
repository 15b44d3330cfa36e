# SPDX-License-Identifier: Apache-2.0
"""The roster: every rank writes an entry to the store, so that missing ranks can be named."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

import psutil
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from ddpilot.errors import RendezvousError
from ddpilot.group.store import wait_for_keys

_SLICE_S = 0.5
_TWIN_WAIT_S = 3.0
_REFUSED = "refused"


@dataclass(frozen=True)
class Member:
    """Entry of one rank."""

    rank: int
    world_size: int
    device: str
    backend: str
    identity: str = ""
    """Identity of the device: equal on two ranks of one host if and only if they share it; "" if unknown."""
    host: str = ""
    pid: int = 0
    started_s: float = 0.0
    """Start time of the process (seconds since the epoch), to distinguish it from a later one with the same pid."""

    @classmethod
    def here(cls, rank: int, world_size: int, device: str, backend: str, identity: str = "") -> Member:
        """The entry of this process."""
        pid = os.getpid()
        started_s = psutil.Process(pid).create_time()
        return cls(rank, world_size, device, backend, identity, socket.gethostname(), pid, started_s)

    @property
    def place(self) -> str:
        return f"host {self.host}, pid {self.pid}, {self.device}"

    def is_gone(self) -> bool:
        """True if the process is known to have exited, which can be determined only on its own host."""
        if self.host != socket.gethostname():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started_s) > 1.0
        except psutil.NoSuchProcess:
            return True

    def is_same_process(self, other: Member) -> bool:
        return (self.host, self.pid) == (other.host, other.pid) and abs(self.started_s - other.started_s) < 1.0


def take_turn(base: Store, me: Member) -> Store:
    """Add this rank to `base` and return the part of the store for this turn, without keys of earlier groups.

    The store counts how often each rank has entered, so that ranks that leave and enter again meet in the same turn.
    Raises RendezvousError if a different living process has this rank; the other ranks raise it in `wait_for_all`.
    """
    turn = base.add(f"turns/{me.rank}", 1)
    if turn > 1:
        _refuse_twin(PrefixStore(f"turn{turn - 1}", base), me)
    mine = PrefixStore(f"turn{turn}", base)
    mine.set(_key(me.rank), json.dumps(asdict(me)))
    return mine


def wait_for_all(store: Store, me: Member, timeout_s: float) -> tuple[Member, ...]:
    """Wait for all ranks and return their entries in rank order. Collective: every rank calls it once per turn.

    Raises RendezvousError after `timeout_s` seconds, with the absent ranks in `missing`; immediately if two processes
    have the same rank, or if ranks disagree on world size or backend.
    """
    keys = [_key(rank) for rank in range(me.world_size)]
    deadline = time.monotonic() + timeout_s
    while True:
        if store.check([_REFUSED]):
            found, fix = json.loads(store.get(_REFUSED))
            raise RendezvousError("waiting for all ranks", found=found, fix=fix, rank=me.rank)
        if wait_for_keys(store, keys, min(_SLICE_S, max(0.01, deadline - time.monotonic()))):
            break
        if time.monotonic() > deadline:
            raise _missing_ranks(store, me, timeout_s)
    members = tuple(Member(**json.loads(store.get(key))) for key in keys)
    _refuse_disagreement(store, members, me)
    return members


def find_sharing(members: Sequence[Member]) -> dict[str, tuple[int, ...]]:
    """Device and host -> ranks, for every device that several ranks share; empty if there is none."""
    ranks: dict[str, tuple[int, ...]] = {}
    for member in members:
        if member.identity:
            name = f"{member.identity} of host {member.host}"
            ranks[name] = (*ranks.get(name, ()), member.rank)
    return {name: shared for name, shared in ranks.items() if len(shared) > 1}


def _refuse(store: Store, me: Member, did: str, found: str, fix: str) -> NoReturn:
    """Raise RendezvousError here and in every rank that is still waiting."""
    store.set(_REFUSED, json.dumps([found, fix]))
    raise RendezvousError(did, found=found, fix=fix, rank=me.rank)


def _key(rank: int) -> str:
    return f"member/{rank}"


def _refuse_twin(before: Store, me: Member) -> None:
    if not wait_for_keys(before, [_key(me.rank)], _TWIN_WAIT_S):
        return
    other = Member(**json.loads(before.get(_key(me.rank))))
    if other.is_same_process(me) or other.is_gone():
        return
    found = f"rank {me.rank} was taken twice: by {other.place}, and by {me.place}"
    fix = "Give every process its own RANK, and stop processes that are left over from an earlier run."
    _refuse(before, me, "entering the group", found, fix)


def _missing_ranks(store: Store, me: Member, timeout_s: float) -> RendezvousError:
    here = [rank for rank in range(me.world_size) if store.check([_key(rank)])]
    missing = tuple(rank for rank in range(me.world_size) if rank not in here)
    places = "; ".join(f"rank {rank} ({Member(**json.loads(store.get(_key(rank)))).place})" for rank in here[:16])
    names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return RendezvousError(
        f"waiting for all {me.world_size} ranks",
        found=f"{names} did not join within {timeout_s:g} s; joined: {places}",
        fix=f"Check the output of {names}: was it started, with this WORLD_SIZE and MASTER_ADDR, and has it exited?",
        rank=me.rank,
        missing=missing,
    )


def _refuse_disagreement(store: Store, members: Sequence[Member], me: Member) -> None:
    for what in ("world_size", "backend"):
        values: dict[object, list[int]] = {}
        for member in members:
            values.setdefault(getattr(member, what), []).append(member.rank)
        if len(values) > 1:
            on_ranks = "; ".join(f"{value!r} on ranks {', '.join(map(str, ranks))}" for value, ranks in values.items())
            found = f"the ranks have different values of {what}: {on_ranks}"
            fix = f"Start every rank with the same {what}."
            _refuse(store, me, "comparing the settings of the ranks", found, fix)


def mark_entered(me: Member) -> None:
    """Write `me` to the store of the default group, which ddpilot has just created."""
    c10d._get_default_store().set(_entry_key(me.rank), json.dumps(asdict(me)))


def read_member(store: Store, rank: int) -> Member | None:
    """The entry that `rank` wrote to `store`, the store of its group; None if it wrote none."""
    if not store.check([_entry_key(rank)]):
        return None
    return Member(**json.loads(store.get(_entry_key(rank))))


def _entry_key(rank: int) -> str:
    return f"ddpilot/member/{rank}"
