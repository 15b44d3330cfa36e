# SPDX-License-Identifier: Apache-2.0
"""Names of process groups that are equal on all ranks."""

from __future__ import annotations

import os
import zlib
from typing import Any

import torch
import torch.distributed as dist

_MAX_LISTED = 256
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

    A restarted rank counts from 0 again, and so do its groups' collectives: notes from different generations are never
    compared.
    """

    def __init__(self) -> None:
        self.group: Any = None
        """The default group at the last call of `has_changed`."""
        self._num_of: dict[str, int] = {}
        self.name = ""

    def has_changed(self) -> bool:
        """True if the default group has changed since the last call; `name` is its generation from then on."""
        if self.group is not None and dist.group.WORLD is self.group:
            return False
        self.group = dist.group.WORLD
        store = _describe_store()
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
