# SPDX-License-Identifier: Apache-2.0
"""`GroupLike`, the protocol of groups, and `FakeGroup`: any rank of any job in one process, to test code with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from ddpilot.environments.topology import Topology
from ddpilot.errors import GroupError

ReduceOp = Literal["sum", "avg", "min", "max", "product"]


class GroupLike(Protocol):
    """The process group as seen from one rank. Every method except `leave` is collective: all ranks must call it."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_world_size(self) -> int: ...
    @property
    def is_rank_zero(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def backend(self) -> str: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def adopted(self) -> bool: ...

    def barrier(self) -> None:
        """Wait for every rank."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce `tensor` (any shape, the same on all ranks) across ranks in place and return it."""

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite `tensor` (any shape, the same on all ranks) with that of rank `src` and return it."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable), in rank order: a list of length `world_size`."""

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """The `value` (picklable) of rank `src`; the values of other ranks are ignored."""

    def leave(self) -> None:
        """Leave the group; a second call does nothing."""

    def __enter__(self) -> GroupLike: ...
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


@dataclass(frozen=True)
class FakeGroup:
    """A group for tests without ranks: rank `rank` of `world_size` ranks that all hold the same values.

    Nothing is sent and no call blocks. Raises GroupError if the rank and the sizes are inconsistent.
    """

    rank: int = 0
    """0 to `world_size` - 1."""
    world_size: int = 1
    """Number of ranks of the simulated job."""
    local_world_size: int = 0
    """Ranks on each node, a divisor of `world_size`; 0: all ranks on one node."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)
    """Device for the tensors of the code under test."""
    backend: str = "fake"
    """Value that stands for `Group.backend`."""
    adopted: bool = False
    """Value that stands for `Group.adopted`."""

    def __post_init__(self) -> None:
        if self.local_world_size == 0:
            object.__setattr__(self, "local_world_size", self.world_size)
        fits = self.world_size >= 1 and self.local_world_size >= 1 and self.world_size % self.local_world_size == 0
        if not fits or not 0 <= self.rank < self.world_size:
            raise GroupError(
                "making a FakeGroup",
                found=f"rank={self.rank}, world_size={self.world_size}, local_world_size={self.local_world_size}",
                fix="Let 0 <= rank < world_size, and local_world_size divide world_size.",
            )

    @property
    def local_rank(self) -> int:
        """0 to `local_world_size` - 1; consecutive ranks are on the same node."""
        return self.rank % self.local_world_size

    @property
    def is_rank_zero(self) -> bool:
        """True if this is rank 0."""
        return self.rank == 0

    @property
    def topology(self) -> Topology:
        """Topology of a job with these ranks and nodes."""
        alone = self.world_size == 1
        return Topology(
            rank=self.rank,
            local_rank=self.local_rank,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            node_rank=self.rank // self.local_world_size,
            nnodes=self.world_size // self.local_world_size,
            master_addr=None if alone else "127.0.0.1",
            master_port=None if alone else 29500,
            environment="alone" if alone else "ddpilot",
            how=f"a FakeGroup of {self.world_size} ranks",
        )

    def barrier(self) -> None:
        """Return immediately."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce `world_size` copies of `tensor` (any shape) in place and return it.

        "sum": multiplies by `world_size`; "product": raises to the power `world_size`; "avg", "min", "max": no change.
        """
        if op == "sum":
            return tensor.mul_(self.world_size)
        return tensor.pow_(self.world_size) if op == "product" else tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return `tensor` (any shape) unchanged. Raises GroupError if `src` is not a rank of the group."""
        self._check(src)
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a list of length `world_size` with `value` at every index."""
        return [value] * self.world_size

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return `value` unchanged. Raises GroupError if `src` is not a rank of the group."""
        self._check(src)
        return value

    def leave(self) -> None:
        """Do nothing."""

    def _check(self, src: int) -> None:
        if not 0 <= src < self.world_size:
            raise GroupError(
                "broadcasting in a FakeGroup",
                found=f"`src` is {src} and the ranks are 0 to {self.world_size - 1}",
                fix="Pass a rank of the group.",
                rank=self.rank,
            )

    def __enter__(self) -> FakeGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
