# SPDX-License-Identifier: Apache-2.0
"""The process group of a session's rank: entered when it is first needed, or adopted from the user's code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ddpilot.environments.topology import Topology
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import ReduceOp


def enter_when_needed(enter: Callable[[], Any]) -> None:
    """Make torch call `enter` where it would raise "Default process group has not been initialized".

    This includes all collectives, `DDP(model)`, `get_rank()` and `get_world_size()`, but not `is_initialized()` and
    `init_process_group()`: code that creates its own group still does.
    """
    hook_default_group()
    c10d._get_default_group.enter = enter  # type: ignore[attr-defined]


def hook_default_group() -> None:
    """Replace `_get_default_group` in all modules, unless that was done.

    The rank server does it before it forks ranks, as each of them would otherwise look at 2,500 modules.
    """
    original = c10d._get_default_group
    if hasattr(original, "enter"):
        return

    @functools.wraps(original)
    def get_default_group() -> Any:
        enter = get_default_group.enter  # type: ignore[attr-defined]
        if enter is not None and not c10d.is_initialized():
            enter()
        return original()

    get_default_group.enter = None  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("_get_default_group") is original:
            module._get_default_group = get_default_group  # type: ignore[attr-defined]


class SessionGroup:
    """`group` in a rank's namespace: refers to the current process group of the rank, also after a rebuild.

    Ranks, sizes and device are always available; a collective, or `process_group`, first enters the group if needed.
    """

    def __init__(self, topology: Topology, device: torch.device, enter: Callable[[], Group]) -> None:
        self.topology = topology
        """Ranks and sizes of this rank, as read from the environment."""
        self.device = device
        """The device of this rank."""
        self._enter = enter

    @property
    def rank(self) -> int:
        """0 to `world_size` - 1."""
        return self.topology.rank

    @property
    def local_rank(self) -> int:
        """The rank's number on this node."""
        return self.topology.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the session."""
        return self.topology.world_size

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this node."""
        return self.topology.local_world_size

    @property
    def is_rank_zero(self) -> bool:
        """True if this is rank 0."""
        return self.rank == 0

    @property
    def is_entered(self) -> bool:
        """True if this rank is in a process group."""
        return c10d.is_initialized()

    @property
    def backend(self) -> str:
        """The backend, as reported by torch. Enters the group if this rank is not in one, which is collective."""
        return self._enter().backend

    @property
    def adopted(self) -> bool:
        """True if code other than ddpilot created the group. Enters the group if needed, which is collective."""
        return self._enter().adopted

    @property
    def process_group(self) -> Any:
        """The `torch.distributed` process group. Enters the group if this rank is not in one, which is collective."""
        return self._enter().process_group

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        self._enter().barrier()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Combine `tensor` (any shape, equal on all ranks) over ranks, in place, and return it. Collective."""
        return self._enter().all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite `tensor` (any shape, equal on all ranks) with rank `src`'s, and return it. Collective."""
        return self._enter().broadcast(tensor, src)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value` (picklable), in rank order: a list of length `world_size`. Collective."""
        return self._enter().all_gather_object(value)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the `value` (picklable) of rank `src`; the argument is ignored on the other ranks. Collective."""
        return self._enter().broadcast_object(value, src)

    def leave(self) -> None:
        """Leave the group if this rank is in one; the next collective enters a new one. All ranks must call it."""
        if self.is_entered:
            self._enter().leave(destroy_adopted=True)

    def __enter__(self) -> SessionGroup:
        self._enter()
        return self

    def __exit__(self, *_error: object) -> None:
        """Do nothing: the session's group outlives the `with` block."""

    def __repr__(self) -> str:
        state = "entered" if self.is_entered else "entered at its first use"
        return f"SessionGroup(rank={self.rank}, world_size={self.world_size}, device='{self.device}', {state})"
