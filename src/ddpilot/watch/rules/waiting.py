# SPDX-License-Identifier: Apache-2.0
"""What rules have in common that say one thing of all ranks which noted it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import Any

from ddpilot.findings.finding import Finding
from ddpilot.record.journal import Entry
from ddpilot.watch.rules.gathering import NS_PER_S, Waiting
from ddpilot.watch.rules.rule import RuleContext


class WaitingRule(ABC):
    """A rule that puts what it sees into `_waiting`, and makes one finding of what the ranks put under the same key."""

    codes: tuple[str, ...]
    kinds: tuple[str, ...]
    patience_ns = NS_PER_S * 2 // 5
    """How long what one rank noted waits for the others, before it is said of those that noted it."""
    waits_for_more = False
    """Whether what all ranks noted waits as long for what else they note."""

    def __init__(self, context: RuleContext) -> None:
        self._context = context
        self._waiting: Waiting[Hashable, Any] = Waiting(context.world_size)

    @abstractmethod
    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        """What `rank` noted."""

    def look(self, now_ns: int) -> Iterable[Finding]:
        """What all ranks noted, or what has waited for the others long enough."""
        for by_rank in self._waiting.ready(now_ns, self.patience_ns, when_all_noted=not self.waits_for_more):
            if (finding := self._finding(by_rank)) is not None:
                yield finding

    def finish(self, now_ns: int) -> Iterable[Finding]:
        """What waits is said now."""
        return self.look(now_ns + self.patience_ns)

    @abstractmethod
    def _finding(self, by_rank: dict[int, Any], /) -> Finding | None:
        """What is said of the values that were put, by rank; None where it turns out to be meant."""
