# SPDX-License-Identifier: Apache-2.0
"""Protocol shared by `Group` and `FakeGroup`; code written against it can be tested without processes."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

from ddpilot.environments.topology import Topology

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
