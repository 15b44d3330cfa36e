# SPDX-License-Identifier: Apache-2.0
"""What several ranks note of the same thing, held together until it can be judged; bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

NS_PER_S = 1_000_000_000
PATIENCE_NS = NS_PER_S * 2 // 5
"""How long what one rank noted waits for the others, before it is said of those that noted it."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Gathering(Generic[K, V]):
    """Values by key and rank. Of more than `limit` keys the oldest are dropped."""

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._values: OrderedDict[K, dict[int, V]] = OrderedDict()

    def put(self, key: K, rank: int, value: V) -> dict[int, V]:
        """What all ranks have put under `key` so far, `value` among it."""
        ranks = self._values.setdefault(key, {})
        ranks[rank] = value
        while len(self._values) > self._limit:
            self._values.popitem(last=False)
        return ranks

    def get(self, key: K) -> dict[int, V]:
        """As `put` returns; empty where there is nothing."""
        return self._values.get(key, {})

    def pop(self, key: K) -> dict[int, V]:
        """As `get`, and it is dropped."""
        return self._values.pop(key, {})


class Waiting(Generic[K, V]):
    """What is said once: as soon as all of `world_size` ranks noted it, or `PATIENCE_NS` after the first did."""

    def __init__(self, world_size: int, limit: int = 256) -> None:
        self._world_size = world_size
        self._limit = limit
        self._since: dict[K, int] = {}
        self._values: dict[K, dict[int, V]] = {}
        self._said: OrderedDict[K, None] = OrderedDict()

    def put(self, key: K, rank: int, value: V, now_ns: int) -> None:
        """`rank` noted `value`; nothing happens where `key` was said."""
        if key in self._said or (len(self._values) >= self._limit and key not in self._values):
            return
        self._since.setdefault(key, now_ns)
        self._values.setdefault(key, {})[rank] = value

    def drop(self, key: K) -> None:
        """Forget `key`: it turned out not to be so."""
        self._since.pop(key, None)
        self._values.pop(key, None)

    def ready(self, now_ns: int, patience_ns: int = PATIENCE_NS) -> Iterator[tuple[K, dict[int, V]]]:
        """Each key that can be said now, with what each rank noted, by rank; it is not given again."""
        for key, since in list(self._since.items()):
            if now_ns - since >= patience_ns or len(self._values[key]) >= self._world_size:
                yield key, self._take(key)

    def settled(self, now_ns: int, patience_ns: int = PATIENCE_NS) -> Iterator[tuple[K, dict[int, V]]]:
        """As `ready`, but also what all ranks noted waits for what else they note."""
        for key, since in list(self._since.items()):
            if now_ns - since >= patience_ns:
                yield key, self._take(key)

    def _take(self, key: K) -> dict[int, V]:
        values = self._values.pop(key)
        del self._since[key]
        self._said[key] = None
        while len(self._said) > self._limit:
            self._said.popitem(last=False)
        return dict(sorted(values.items()))


class Members:
    """The ranks of each DDP model's group, of the 256 newest models."""

    def __init__(self, world_size: int) -> None:
        self._all = tuple(range(world_size))
        self._by_model: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def note(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """Take them from a ``ddp_model`` entry, where None stands for all."""
        ranks = self._all if values["ranks"] is None else tuple(values["ranks"])
        self._by_model[values["model"]] = ranks
        if len(self._by_model) > 256:
            self._by_model.popitem(last=False)
        return ranks

    def of(self, model: int | None) -> tuple[int, ...]:
        """Empty where the model is not known."""
        return self._by_model.get(-1 if model is None else model, ())


def some(names: Sequence[object], limit: int = 5, total: int | None = None) -> str:
    """At most `limit` of `names` on one line, and how many more there are, of `total` (default: those given)."""
    more = (total or len(names)) - limit
    return ", ".join(str(name) for name in names[:limit]) + (f" and {more} more" if more > 0 else "")
