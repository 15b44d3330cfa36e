# SPDX-License-Identifier: Apache-2.0
"""What several ranks note of the same thing, held together until it can be judged; bounded."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ddpilot.watch.rules.newest import Newest

NS_PER_S = 1_000_000_000

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Gathering(Generic[K, V]):
    """Values by key and rank. Of more than `limit` keys the oldest are dropped."""

    def __init__(self, limit: int = 256) -> None:
        self._values: Newest[K, dict[int, V]] = Newest(limit)

    def put(self, key: K, rank: int, value: V) -> dict[int, V]:
        """What all ranks have put under `key` so far, `value` among it."""
        ranks = self._values.setdefault(key, {})
        ranks[rank] = value
        return ranks

    def get(self, key: K) -> dict[int, V]:
        """As `put` returns; empty where there is nothing."""
        return self._values.get(key, {})

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)

    def pop(self, key: K) -> dict[int, V]:
        """As `get`, and it is dropped."""
        return self._values.pop(key, {})


class Waiting(Generic[K, V]):
    """What is said as soon as all of `world_size` ranks noted it, or some time after the first did."""

    def __init__(self, world_size: int, limit: int = 256) -> None:
        self._world_size = world_size
        self._limit = limit
        self._since: dict[K, int] = {}
        self._values: dict[K, dict[int, V]] = {}

    def put(self, key: K, rank: int, value: V, now_ns: int) -> None:
        """`rank` noted `value`."""
        if len(self._values) >= self._limit and key not in self._values:
            return
        self._since.setdefault(key, now_ns)
        self._values.setdefault(key, {})[rank] = value

    def drop(self, key: K) -> None:
        """Forget `key`: it turned out not to be so."""
        self._since.pop(key, None)
        self._values.pop(key, None)

    def ready(self, now_ns: int, patience_ns: int, *, when_all_noted: bool) -> Iterator[dict[int, V]]:
        """What each rank noted, by rank, of each key that has waited for `patience_ns`; it is not given again.

        `when_all_noted`: also of one that waits for no rank any more.
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
    """The ranks of each DDP model's group, of the 256 newest models."""

    def __init__(self, world_size: int) -> None:
        self._all = tuple(range(world_size))
        self._by_model: Newest[int, tuple[int, ...]] = Newest(256)

    def note(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """Take them from a ``ddp_model`` entry, where None stands for all."""
        ranks = self._all if values["ranks"] is None else tuple(values["ranks"])
        self._by_model[values["model"]] = ranks
        return ranks

    def of(self, model: int | None) -> tuple[int, ...]:
        """Empty where the model is not known."""
        return self._by_model.get(-1 if model is None else model, ())


def some(names: Sequence[object], limit: int = 5, total: int | None = None) -> str:
    """At most `limit` of `names` on one line, and how many more there are, of `total` (default: those given)."""
    more = (total or len(names)) - limit
    return ", ".join(str(name) for name in names[:limit]) + (f" and {more} more" if more > 0 else "")
