# SPDX-License-Identifier: Apache-2.0
"""The process group of a rank that stays: entered when something needs it, or adopted from the user's code."""

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
    """Let torch call `enter` where it would say "Default process group has not been initialized".

    That is asked for by every collective, by `DDP(model)`, by `get_rank()` and `get_world_size()`; not by
    `is_initialized()` and `init_process_group()`, so code that makes its own group goes on to do so.
    """
    original = c10d._get_default_group

    @functools.wraps(original)
    def get_default_group() -> Any:
        if not c10d.is_initialized():
            enter()
        return original()

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("_get_default_group") is original:
            module._get_default_group = get_default_group  # type: ignore[attr-defined]


class SessionGroup:
    """`group` in the namespace of a rank: stands for whatever process group the rank is in, now and after a rebuild.

    Who it is can be asked for at any time; a collective, or `process_group`, enters the group first where needed.
    """

    def __init__(self, topology: Topology, device: torch.device, enter: Callable[[], Group]) -> None:
        self.topology = topology
        """What the environment says about this rank."""
        self.device = device
        """The device of this rank."""
        self._enter = enter

    @property
    def rank(self) -> int:
        """0 to `world_size` - 1."""
        return self.topology.rank

    @property
    def local_rank(self) -> int:
        """The position on this node."""
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
        """Is this rank 0?"""
        return self.rank == 0

    @property
    def is_entered(self) -> bool:
        """Is this rank in a process group now?"""
        return c10d.is_initialized()

    @property
    def backend(self) -> str:
        """As torch reports it. Enters the group where this rank is in none: then every rank has to."""
        return self._enter().backend

    @property
    def adopted(self) -> bool:
        """Was the group made by code other than ddpilot's? Enters it where this rank is in none."""
        return self._enter().adopted

    @property
    def process_group(self) -> Any:
        """torch's own object. Enters the group where this rank is in none: then every rank has to."""
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
        """Every rank's `value` (picklable), in rank order: a list of length `world_size`. Collective."""
        return self._enter().all_gather_object(value)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """The `value` (picklable) of rank `src`; what the others pass is ignored. Collective."""
        return self._enter().broadcast_object(value, src)

    def leave(self) -> None:
        """Leave the group, where this rank is in one; the next collective enters a new one. All ranks call it."""
        if self.is_entered:
            self._enter().leave(destroy_adopted=True)

    def __enter__(self) -> SessionGroup:
        self._enter()
        return self

    def __exit__(self, *_error: object) -> None:
        """The session's group outlives a `with` block."""

    def __repr__(self) -> str:
        state = "entered" if self.is_entered else "entered at its first use"
        return f"SessionGroup(rank={self.rank}, world_size={self.world_size}, device='{self.device}', {state})"
