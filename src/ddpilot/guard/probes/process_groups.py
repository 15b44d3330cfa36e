# SPDX-License-Identifier: Apache-2.0
"""Names of process groups that are equal on all ranks."""

from __future__ import annotations

import os
import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist

from ddpilot.guard.notes import NO_GROUP

_MAX_LISTED = 256
_OTHER_COMMUNICATION = ("horovod", "mpi4py.MPI")
"""Modules through which ranks may average gradients without a process group of torch."""

_C10D: Any = dist.distributed_c10d if dist.is_available() else None


def describe_group(group: Any) -> str:
    """Return a text with the ranks of `group` that is equal on each of them."""
    ranks = dist.get_process_group_ranks(group)
    if ranks == list(range(dist.get_world_size())):
        return "world"
    listed = ",".join(map(str, ranks))
    return listed if len(ranks) <= _MAX_LISTED else f"{len(ranks)} ranks {zlib.crc32(listed.encode()):08x}"


class GroupGenerations:
    """Names each default process group of this process with a name equal on all of its ranks, also after a rebuild.

    The time before a group, and between two, has a name too, which starts with `NO_GROUP`. A restarted rank counts from
    0 again, and so do its groups' collectives: notes from different generations are never compared.
    """

    def __init__(self) -> None:
        self.group: Any = self  # unlike any group, and unlike None
        """The default group at the last call of `has_changed`; None if there was none."""
        self._num_of: dict[str, int] = {}
        self.name = ""

    def has_changed(self) -> bool:
        """True if the default group has changed since the last call; `name` is its generation from then on."""
        if find_world() is self.group:
            return False
        self.group = find_world()
        store = _describe_store() if self.group is not None else NO_GROUP
        self._num_of[store] = self._num_of.get(store, 0) + 1
        self.name = f"{store}/{self._num_of[store]}"
        return True


def _describe_store() -> str:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return f"{attempt}/{getattr(store, 'port', getattr(store, 'path', ''))}"
    except (RuntimeError, ValueError):
        return attempt


def sequence_number(group: Any) -> int:
    """Return the number of collectives that `group` has started; -1 if unknown, as after its end."""
    if group is None:
        return -1
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return _number_of_backend(group)


def _number_of_backend(group: Any) -> int:
    """Return the accelerator backend's sequence number: torch asks only the backends that it knows."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return -1
    try:
        return int(group._get_backend(accelerator)._get_sequence_number_for_group())
    except RuntimeError:
        return -1


def find_world() -> Any:
    """Return the default process group of this process; None if there is none."""
    # `dist.group.WORLD` calls three more torch functions, which would cost time in every step.
    return None if _C10D is None else _C10D._world.default_pg


def is_alone(world: Any) -> bool:
    """True if this process trains with no other one: `world`, its default group, has one rank.

    Without a group, a rank of several is not alone, as the program may have omitted the group by mistake.
    """
    if world is not None:
        return bool(world.size() < 2)
    num_ranks = os.environ.get("WORLD_SIZE", "")
    return not num_ranks.isdecimal() or int(num_ranks) < 2 or any(name in sys.modules for name in _OTHER_COMMUNICATION)
