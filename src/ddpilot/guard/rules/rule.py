# SPDX-License-Identifier: Apache-2.0
"""What a rule is built from: its interface, base classes, context, and bounded state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.journal import Entry
from ddpilot.user_files import CodeLine


def no_log(_: int) -> RankLog | None:
    """Return None: nothing is known about any rank's ring."""
    return None


@dataclass(frozen=True, kw_only=True)
class RuleContext:
    """What rules have access to besides entries."""

    world_size: int
    log: Callable[[int], RankLog | None] = no_log
    """Returns what a rank's ring holds, None if it has none. Takes milliseconds: call it only before reporting."""
    has_all_logs: bool = True
    """True if a rank for which `log` returns None has no ring; False if it may be on a different machine."""
    sources: Callable[[], Mapping[str, str]] = dict
    """Returns by name the user's sources that are not in a file, such as cells."""


class Rule(Protocol):
    """Examines some kinds of entries; created with a `RuleContext`. Keeps bounded state."""

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of its findings."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of entries that are passed to `feed`."""

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        """Return the findings after `entry`, the next one of `rank`. Entries of different ranks come in any order."""

    def look(self, now_ns: int, /) -> Iterable[Finding]:
        """Return the findings after everything known at `now_ns` (CLOCK_MONOTONIC) has been fed."""

    def pause(self, now_ns: int, /, *, is_ok: bool) -> Iterable[Finding]:
        """Return the findings that wait for notes of other ranks, at the end of a cell; more entries may follow.

        `is_ok`: False if the cell failed or was interrupted; the findings are then dropped.
        """

    def finish(self, now_ns: int, /) -> Iterable[Finding]:
        """Return the last findings, when no more entries will follow; ``()`` if there are none."""


class PromptRule:
    """A rule that returns all of its findings from `feed`."""

    def __init__(self, context: RuleContext) -> None:
        self._context = context

    def look(self, now_ns: int, /) -> Iterable[Finding]:  # noqa: ARG002 - as every rule
        """Return nothing."""
        return ()

    def pause(self, now_ns: int, /, *, is_ok: bool) -> Iterable[Finding]:  # noqa: ARG002 - as every rule
        """Return nothing."""
        return ()

    def finish(self, now_ns: int, /) -> Iterable[Finding]:  # noqa: ARG002 - as every rule
        """Return nothing."""
        return ()


def line_of(site: Mapping[str, Any] | None) -> tuple[str, int]:
    """Return file and line of what a probe noted with `Notes.site`; ranks that note the same line are grouped."""
    site = site or {}
    return site.get("file", ""), site.get("line", 0)


def place_of(site: Mapping[str, Any] | None) -> CodeLine | None:
    """Return the line that a probe noted with `Notes.site`; None if there is none."""
    if not site or "file" not in site:
        return None
    return CodeLine(**{key: site[key] for key in ("file", "line", "function", "text") if key in site})


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """A mapping with at most `limit` keys: a new key replaces the oldest."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            self.popitem(last=False)


NS_PER_S = 1_000_000_000


class ByRank(Generic[K, V]):
    """Values by key and rank. With more than `limit` keys, the oldest are dropped."""

    def __init__(self, limit: int = 256) -> None:
        self._values: BoundedDict[K, dict[int, V]] = BoundedDict(limit)

    def put(self, key: K, rank: int, value: V) -> dict[int, V]:
        """Add `value`, and return what all ranks have put under `key` so far."""
        ranks = self._values.setdefault(key, {})
        ranks[rank] = value
        return ranks

    def get(self, key: K) -> dict[int, V]:
        """Return what `put` returned last for `key`; empty if there is nothing."""
        return self._values.get(key, {})


class PendingValues(Generic[K, V]):
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


class ModelRanks:
    """The ranks of each DDP model's group, for the 256 newest models."""

    def __init__(self, world_size: int) -> None:
        self._all = tuple(range(world_size))
        self._by_model: BoundedDict[int, tuple[int, ...]] = BoundedDict(256)

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


class WaitingRule(ABC):
    """A rule that puts entries into `_waiting` and makes one finding of the values put under the same key."""

    codes: tuple[str, ...]
    kinds: tuple[str, ...]
    patience_ns = NS_PER_S * 2 // 5
    """How long to wait for other ranks before reporting the ranks that noted it."""
    waits_for_more = False
    """True if the rule waits just as long after all ranks have noted it, for further notes."""

    def __init__(self, context: RuleContext) -> None:
        self._context = context
        self._waiting: PendingValues[Hashable, Any] = PendingValues(context.world_size)

    @abstractmethod
    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        """Put what `rank` noted into `_waiting`; see `Rule.feed`."""

    def look(self, now_ns: int) -> Iterable[Finding]:
        """Yield findings for what all ranks noted, or what has waited long enough for the others."""
        for by_rank in self._waiting.ready(now_ns, self.patience_ns, when_all_noted=not self.waits_for_more):
            if (finding := self._finding(by_rank)) is not None:
                yield finding

    def pause(self, now_ns: int, *, is_ok: bool) -> Iterable[Finding]:
        """See `Rule.pause`. A rule that `waits_for_more` keeps waiting after a cell that ended well.

        The next cell may note what such a rule waits for, such as that the ranks gather what this one evaluated.
        """
        return () if self.waits_for_more and is_ok else self._take_all(now_ns)

    def finish(self, now_ns: int) -> Iterable[Finding]:
        """Return findings for everything that is still waiting."""
        return self._take_all(now_ns)

    def _take_all(self, now_ns: int) -> Iterable[Finding]:
        return self.look(now_ns + self.patience_ns)

    @abstractmethod
    def _finding(self, by_rank: dict[int, Any], /) -> Finding | None:
        """Return the finding for the values that were put, by rank; None if they turn out to be intended."""
