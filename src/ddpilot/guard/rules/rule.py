# SPDX-License-Identifier: Apache-2.0
"""The interface of a rule, and the context that it is created with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ddpilot.findings.finding import Finding, Place
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.journal import Entry


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


def place_of(site: Mapping[str, Any] | None) -> Place | None:
    """Return the line that a probe noted with `Notes.site`; None if there is none."""
    if not site or "file" not in site:
        return None
    return Place(**{key: site[key] for key in ("file", "line", "function", "text") if key in site})
