# SPDX-License-Identifier: Apache-2.0
"""Values that the ranks returned, unpickled on first access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from ddpilot.errors import LaunchError
from ddpilot.launching.shipping.parcel import open_parcel


class RankResults(Sequence[Any]):
    """Every rank's value, by rank: `results[0]` is what rank 0 returned.

    A value is unpickled on first access. Large tensors in it are backed by a memory file, which is read when they are
    used; they belong to this process. A DDP model comes back as the module that it wraps. Classes and functions that
    the parent sent come back as the parent's own objects.
    """

    def __init__(self, parcels: Sequence[memoryview], known: Sequence[Any]) -> None:
        self._parcels: list[Any] = list(parcels)
        self._known = known
        self._values: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._parcels)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(len(self)))]
        rank = range(len(self))[index]
        if rank not in self._values:
            self._values[rank] = self._open(rank)
        return self._values[rank]

    def __repr__(self) -> str:
        return f"RankResults({list(self)!r})"

    def _open(self, rank: int) -> Any:
        try:
            value, _ = open_parcel(self._parcels[rank], self._known)
        except Exception as error:  # unpickling runs the value's own code, which may raise anything
            raise LaunchError(
                f"reading what rank {rank} returned",
                found=f"{type(error).__name__}: {error}",
                fix="Return plain values, tensors, a model or its `state_dict()`, or objects "
                "whose modules this process can import",
                rank=rank,
            ) from error
        self._parcels[rank] = None  # frees what the value does not use
        return value
