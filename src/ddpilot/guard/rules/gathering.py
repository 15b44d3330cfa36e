# SPDX-License-Identifier: Apache-2.0
"""Collect what several ranks note about the same thing until it can be judged; bounded in size."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ddpilot.guard.rules.newest import Newest

NS_PER_S = 1_000_000_000

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Gathering(Generic[K, V]):
    """Values by key and rank. With more than `limit` keys, the oldest are dropped."""

    def __init__(self, limit: int = 256) -> None:
        self._values: Newest[K, dict[int, V]] = Newest(limit)

    def put(self, key: K, rank: int, value: V) -> dict[int, V]:
        """Add `value`, and return what all ranks have put under `key` so far."""
        ranks = self._values.setdefault(key, {})
        ranks[rank] = value
        return ranks

    def get(self, key: K) -> dict[int, V]:
        """Return what `put` returned last for `key`; empty if there is nothing."""
        return self._values.get(key, {})


class Waiting(Generic[K, V]):
    """Values that are ready once all of `world_size` ranks noted them, or some time after the first did."""

    def __init__(self, world_size: int, limit: int = 256) -> None:
        self._world_size = world_size
        self._limit = limit
        self._since: dict[K, int] = {}
        self._values: dict[K, dict[int, V]] = {}

    def put(self, key: K, rank: int, value: V, now_ns: int) -> None:
        """Add the `value` that `rank` noted. Dropped if there are `limit` other keys."""
        if len(self._values) >= self._limit and key not in self._values:
            return
        self._since.setdefault(key, now_ns)
        self._values.setdefault(key, {})[rank] = value

    def ready(self, now_ns: int, patience_ns: int, *, when_all_noted: bool) -> Iterator[dict[int, V]]:
        """Remove and yield the values, by rank, of each key that has waited for `patience_ns`.

        `when_all_noted`: also of keys that all ranks have noted.
        """
        for key, since in list(self._since.items()):
            is_complete = len(self._values[key]) >= self._world_size
            if now_ns - since >= patience_ns or (when_all_noted and is_complete):
                yield self._take(key)

    def _take(self, key: K) -> dict[int, V]:
        values = self._values.pop(key)
        del self._since[key]
        return dict(sorted(values.items()))


class Members:
    """The ranks of each DDP model's group, for the 256 newest models."""

    def __init__(self, world_size: int) -> None:
        self._all = tuple(range(world_size))
        self._by_model: Newest[int, tuple[int, ...]] = Newest(256)

    def note(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """Add the ranks of a ``ddp_model`` entry, in which None stands for all ranks, and return them."""
        ranks = self._all if values["ranks"] is None else tuple(values["ranks"])
        self._by_model[values["model"]] = ranks
        return ranks

    def of(self, model: int | None) -> tuple[int, ...]:
        """Return the ranks of `model`; empty if it is unknown."""
        return self._by_model.get(-1 if model is None else model, ())


def some(names: Sequence[object], limit: int = 5, total: int | None = None) -> str:
    """Format at most `limit` of `names` on one line, with the number of the rest of `total` (default: all given)."""
    more = (total or len(names)) - limit
    return ", ".join(str(name) for name in names[:limit]) + (f" and {more} more" if more > 0 else "")
