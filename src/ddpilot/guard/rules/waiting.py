# SPDX-License-Identifier: Apache-2.0
"""Base class of rules that make one finding for all ranks that noted the same thing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import Any

from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.gathering import NS_PER_S, Waiting
from ddpilot.guard.rules.rule import RuleContext
from ddpilot.record.journal import Entry


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
        self._waiting: Waiting[Hashable, Any] = Waiting(context.world_size)

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
