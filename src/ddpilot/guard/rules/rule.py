# SPDX-License-Identifier: Apache-2.0
"""Base classes of rules, their context, and bounded state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.guard.notes import DdpModelNote, LoaderPassNote, PassKey, Site, TrainsNote
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.journal import Entry
from ddpilot.user_files import CodeLine

NS_PER_S = 1_000_000_000


def no_log(_: int) -> RankLog | None:
    """Return None: nothing is known about any rank's ring."""
    return None


@dataclass(frozen=True, kw_only=True)
class RuleContext:
    """The job that the entries belong to."""

    world_size: int
    log: Callable[[int], RankLog | None] = no_log
    """Returns what a rank's ring holds, None if it has none. Takes milliseconds: call it only before reporting."""
    has_all_logs: bool = True
    """True if a rank for which `log` returns None has no ring; False if it may be on a different machine."""
    sources: Callable[[], Mapping[str, str]] = dict
    """Returns by name the user's sources that are not in a file, such as cells."""


class Rule(ABC):
    """Examines some kinds of entries and returns findings. Keeps bounded state."""

    kinds: ClassVar[tuple[str, ...]]
    """The kinds of entries that are passed to `feed`, keys of `ddpilot.guard.notes.NOTES`."""
    compares_ranks: ClassVar[bool] = True
    """False if each rank is examined separately, so that entries of other ranks do not matter."""

    def __init__(self, context: RuleContext) -> None:
        self._context = context

    @abstractmethod
    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        """Return the findings after `entry`, the next one of `rank`. Entries of different ranks come in any order."""

    def look(self, now_ns: int, /) -> Iterable[Finding]:  # noqa: ARG002 - used by some rules
        """Return the findings after everything known at `now_ns` (CLOCK_MONOTONIC) has been fed."""
        return ()

    def pause(self, now_ns: int, /, *, is_ok: bool) -> Iterable[Finding]:  # noqa: ARG002 - used by some rules
        """Return the findings that wait for notes of other ranks, at the end of a cell; more entries may follow.

        `is_ok`: False if the cell failed or was interrupted; the findings are then dropped.
        """
        return ()

    def finish(self, now_ns: int, /) -> Iterable[Finding]:  # noqa: ARG002 - used by some rules
        """Return the last findings, when no more entries will follow."""
        return ()


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MAX_WAITING = 256


class WaitingRule(Rule, Generic[V]):
    """A rule that makes one finding of what the ranks noted under the same key; by default, at the same line."""

    patience_ns = NS_PER_S * 2 // 5
    """How long to wait for other ranks before reporting the ranks that noted it."""
    waits_for_more = False
    """True if the rule waits just as long after all ranks have noted it, for further notes."""

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._waiting: dict[Hashable, tuple[int, dict[int, V]]] = {}

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        """Wait for what other ranks note at the same line; see `Rule.feed`."""
        self._wait(line_of(entry.values["site"]), rank, entry.values, entry.time_ns)
        return ()

    def _wait(self, key: Hashable, rank: int, value: V, now_ns: int) -> None:
        """Add the `value` that `rank` noted under `key`. Dropped if 256 other keys are waiting."""
        if len(self._waiting) < _MAX_WAITING or key in self._waiting:
            self._waiting.setdefault(key, (now_ns, {}))[1][rank] = value

    def look(self, now_ns: int, /) -> Iterable[Finding]:
        """Yield findings for what all ranks noted, or what has waited long enough for the other ranks."""
        for key, (since_ns, by_rank) in list(self._waiting.items()):
            is_complete = len(by_rank) >= self._context.world_size and not self.waits_for_more
            if is_complete or now_ns - since_ns >= self.patience_ns:
                del self._waiting[key]
                if (finding := self._finding(dict(sorted(by_rank.items())))) is not None:
                    yield finding

    def pause(self, now_ns: int, /, *, is_ok: bool) -> Iterable[Finding]:
        """See `Rule.pause`. A rule that `waits_for_more` keeps waiting after a cell that ended well.

        The next cell may note what such a rule waits for, such as that the ranks gather what this one evaluated.
        """
        return () if self.waits_for_more and is_ok else self.finish(now_ns)

    def finish(self, now_ns: int, /) -> Iterable[Finding]:
        """Return findings for everything that is still waiting."""
        return self.look(now_ns + self.patience_ns)

    @abstractmethod
    def _finding(self, by_rank: dict[int, V], /) -> Finding | None:
        """Return the finding for the values that were put, by rank; None if they turn out to be intended."""


def finding_at_line(code: str, by_rank: Mapping[int, Any], summary: str, *evidence: str, **texts: Any) -> Finding:
    """Build a finding of these ranks at the line of the first one's note. For `texts` see `make_finding`."""
    line = place_of(next(iter(by_rank.values()))["site"])
    return make_finding(code, summary=summary, ranks=tuple(by_rank), line=line, evidence=evidence, **texts)


def num_ranks_of(group: str, world_size: int) -> int:
    """Return the number of ranks of `group`, named as `describe_group` names it."""
    return int(group.partition(" ")[0]) if " " in group else len(ranks_of(group, world_size))


def ranks_of(group: str, world_size: int) -> Sequence[int]:
    """Return the ranks of `group`, named as `describe_group` names it; empty if its name does not list them."""
    if group == "world":
        return range(world_size)
    return () if not group or " " in group else [int(rank) for rank in group.split(",")]


def ranks_of_model(note: DdpModelNote, world_size: int) -> Sequence[int]:
    """Return the ranks of the group of a DDP model."""
    return range(world_size) if note["ranks"] is None else note["ranks"]


def line_of(site: Site) -> tuple[str, int]:
    """Return file and line of `site`; ranks that note the same line are grouped."""
    return site.get("file", ""), site.get("line", 0)


def place_of(site: Site) -> CodeLine | None:
    """Return `site` as a place; None if it is empty."""
    return CodeLine(**site) if site else None


def some(names: Sequence[object], limit: int = 5, total: int | None = None) -> str:
    """Format at most `limit` of `names` on one line, with the number of the rest of `total` (default: all given)."""
    more = (total or len(names)) - limit
    return ", ".join(str(name) for name in names[:limit]) + (f" and {more} more" if more > 0 else "")


class BoundedDict(OrderedDict[K, V]):
    """A mapping with at most `limit` keys: a new key replaces the oldest."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            self.popitem(last=False)


class ByRank(BoundedDict[K, dict[int, V]]):
    """Values by key and rank. A key that is not there has no values."""

    def __init__(self, limit: int = 256) -> None:
        super().__init__(limit)

    def put(self, key: K, rank: int, value: V) -> dict[int, V]:
        """Add `value`, and return what all ranks have put under `key` so far."""
        ranks = self.setdefault(key, {})
        ranks[rank] = value
        return ranks

    def __missing__(self, key: K) -> dict[int, V]:
        return {}


Pass = tuple[int, int]
"""Loader and number of a pass over it."""


def pass_of(note: PassKey) -> Pass:
    """Return the pass that a note is about."""
    return note["loader"], note["pass"]


class TrainingPasses:
    """The newest passes over loaders, by rank, and the DDP models that they train."""

    kinds = ("ddp_model", "loader_pass", "trains")

    def __init__(self, world_size: int) -> None:
        self.passes: ByRank[Pass, LoaderPassNote] = ByRank(64)
        self.training: ByRank[Pass, TrainsNote] = ByRank(64)
        """The ranks' notes on the model that a pass trains."""
        self._world_size = world_size
        self._ranks_of: BoundedDict[int, Sequence[int]] = BoundedDict(256)

    def add(self, rank: int, entry: Entry) -> None:
        """Add an entry of `rank`; ignores those not of one of the `kinds`."""
        if entry.kind == "ddp_model":
            self._ranks_of[entry.values["model"]] = ranks_of_model(entry.values, self._world_size)
        elif entry.kind == "loader_pass":
            self.passes.put(pass_of(entry.values), rank, entry.values)
        elif entry.kind == "trains":
            self.training.put(pass_of(entry.values), rank, entry.values)

    def ranks_of(self, model: int) -> Sequence[int]:
        """Return the ranks of the group of the DDP model; empty if it is unknown."""
        return self._ranks_of.get(model, ())

    def members(self, key: Pass) -> Sequence[int]:
        """Return the ranks of the first model that the pass was seen to train; empty if there is none."""
        return next((self.ranks_of(note["model"]) for note in self.training[key].values()), ())

    def complete(self, key: Pass) -> dict[int, LoaderPassNote]:
        """Return what all ranks of the model noted on the pass; empty until all train it, or if there is one rank."""
        training, passes, members = self.training[key], self.passes[key], self.members(key)
        models = {training[rank]["model"] if rank in training and rank in passes else None for rank in members}
        return {} if len(members) < 2 or len(models) > 1 or None in models else {rank: passes[rank] for rank in members}
