# SPDX-License-Identifier: Apache-2.0
"""`Group`: torch's default process group as seen from this rank, with the rank's device."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpilot.environments.topology import Topology
from ddpilot.errors import GroupError
from ddpilot.group.device import is_asynchronous
from ddpilot.group.protocol import ReduceOp
from ddpilot.group.teardown import take_down, wait_for_peers

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # gloo has no average
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True)
class Group:
    """The default process group as seen from this rank; created by `init_group`.

    As a context manager it leaves the group on exit, without waiting for the peers if the body raised.
    """

    rank: int
    """0 to `world_size` - 1."""
    world_size: int
    """Number of ranks of the job."""
    local_rank: int
    """Rank within this node, 0 to `local_world_size` - 1."""
    local_world_size: int
    """Number of ranks on this node."""
    topology: Topology
    """Topology detected from the environment. For an adopted group its rank and sizes may differ from the group's."""
    device: torch.device
    """The device of this rank, set as the current device."""
    backend: str
    """As torch reports it: "gloo", "nccl", "cpu:gloo,cuda:nccl"."""
    process_group_ref: weakref.ref[dist.ProcessGroup]
    """Weak reference to torch's process group: a `Group` in a variable does not keep sockets and threads of a group
    that was left."""
    adopted: bool = False
    """True if the group was created by other code than ddpilot; `leave` then does not destroy it."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's process group. Raises GroupError after the group was left or replaced."""
        group = self.process_group_ref()
        if group is None or not self.is_live:
            raise GroupError(
                "using a process group",
                found="this group was left, or a new one has replaced it",
                fix="Call init_group() again and use what it returns.",
                rank=self.rank,
            )
        return group

    @property
    def is_rank_zero(self) -> bool:
        """True if this is rank 0 of the job."""
        return self.rank == 0

    @property
    def is_live(self) -> bool:
        """True if this is still torch's default group; False after it was left or replaced."""
        return dist.is_initialized() and dist.group.WORLD is self.process_group_ref()

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        on_device = is_asynchronous(self.backend, self.device)
        dist.barrier(self.process_group, device_ids=[self.device.index] if on_device else None)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce `tensor` (any shape, the same on all ranks) across ranks in place and return it. Collective.

        `op`: "sum", "avg" (floating point), "min", "max" or "product".
        """
        dist.all_reduce(tensor, _OPS[op], self.process_group)
        return tensor.div_(self.world_size) if op == "avg" else tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite `tensor` (any shape, the same on all ranks) with rank `src`'s and return it. Collective."""
        dist.broadcast(tensor, src, self.process_group)
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value` (picklable), in rank order: a list of length `world_size`. Collective."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, self.process_group)
        return values

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the `value` (picklable) of rank `src`; the values of other ranks are ignored. Collective."""
        values = [value if self.rank == src else None]
        dist.broadcast_object_list(values, src, self.process_group)
        return values[0]

    def leave(self, *, destroy_adopted: bool = False, peers_limit_s: float = 5.0) -> None:
        """Leave the group: wait up to `peers_limit_s` seconds for the other ranks to leave too, then destroy it.

        Not collective: if a peer has exited or is stuck, the call returns after the limit. A second call does nothing.
        A group that other code created is kept, unless `destroy_adopted`, which destroys it without waiting.
        """
        if not self.is_live or (self.adopted and not destroy_adopted):
            return
        healthy = self.adopted or wait_for_peers(self.rank, self.world_size, peers_limit_s)
        take_down(healthy)

    def __repr__(self) -> str:
        return (
            f"Group(rank={self.rank}, world_size={self.world_size}, device='{self.device}', backend='{self.backend}')"
        )

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.leave(peers_limit_s=5.0 if kind is None else 0.0)
