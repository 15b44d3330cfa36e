# SPDX-License-Identifier: Apache-2.0
"""What a rule is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ddpilot.findings.finding import Finding, Place
from ddpilot.record.journal import Entry
from ddpilot.record.log import RankLog


def no_log(_: int) -> RankLog | None:
    """Nothing is known of any rank's ring."""
    return None


@dataclass(frozen=True, kw_only=True)
class RuleContext:
    """What rules may know besides entries."""

    world_size: int
    log: Callable[[int], RankLog | None] = no_log
    """What a rank's ring holds now; None where there is none. It takes milliseconds: asked before a finding is said."""
    has_all_logs: bool = True
    """Whether a rank of which `log` knows nothing has no ring; else it may be on another machine."""
    sources: Callable[[], Mapping[str, str]] = dict
    """The user's texts that lie in no file, such as cells, by name."""


class Rule(Protocol):
    """Looks at some kinds of entries; made with a `RuleContext`. Keeps bounded state."""

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of its findings."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the entries that it is fed."""

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        """What can be said after `entry`, the next one of `rank`; those of other ranks may come earlier or later."""

    def look(self, now_ns: int, /) -> Iterable[Finding]:
        """What can be said now that everything known at `now_ns` (CLOCK_MONOTONIC) has been fed."""

    def finish(self, now_ns: int, /) -> Iterable[Finding]:
        """What can be said now that no entry will come any more. A rule that has nothing to add returns ``()``."""


class PromptRule:
    """A rule that says all it has to say when it is fed, so that nothing waits."""

    def __init__(self, context: RuleContext) -> None:
        self._context = context

    def look(self, now_ns: int, /) -> Iterable[Finding]:  # noqa: ARG002 - as every rule
        """Nothing waits."""
        return ()

    def finish(self, now_ns: int, /) -> Iterable[Finding]:  # noqa: ARG002 - as every rule
        """Nothing waits."""
        return ()


def line_of(site: Mapping[str, Any] | None) -> tuple[str, int]:
    """The file and the line of what a probe noted with `Notes.site`: what ranks note there is one thing."""
    site = site or {}
    return site.get("file", ""), site.get("line", 0)


def place_of(site: Mapping[str, Any] | None) -> Place | None:
    """The line that a probe noted with `Notes.site`; None where it found none."""
    if not site or "file" not in site:
        return None
    return Place(**{key: site[key] for key in ("file", "line", "function", "text") if key in site})
