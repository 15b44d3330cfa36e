# SPDX-License-Identifier: Apache-2.0
"""One-line notice of why ranks are being terminated; the full report follows once they have exited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddpilot.errors import DdpilotError, RankError
from ddpilot.launching.crash import find_raised_line

_PATIENCE_S = 0.3
"""Seconds within which a rank that raised usually exits; the full report is then available and no notice is needed."""

_MAX_CHARS = 500


class Forerunner:
    """Shows the notice of one attempt, at most once, by `say`. A rank that imported torch takes 1 s or more to exit."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._has_told = False

    def is_due(self, waited_s: float) -> bool:
        """True if the notice should be shown: the failure has been known for `waited_s` and the rank has not exited."""
        return not self._has_told and waited_s > _PATIENCE_S

    def tell(self, error: DdpilotError) -> None:
        """Show the notice about `error`, unless one was shown before."""
        if not self._has_told:
            self._has_told = True
            self._say(f"{foretell(error)}; the report follows when the ranks have ended")


def foretell(error: DdpilotError) -> str:
    """The failure, its line and the codes of the findings in one line."""
    findings: Sequence[Any] = getattr(error, "findings", ())
    cause = next((each for each in findings if error.found.startswith(each.summary)), None)
    if cause is not None:
        return _shorten(f"{cause.summary} ({cause.code}); {cause.why}".removesuffix("; "))
    parts = [_shorten(error.found.partition("\n")[0])]
    if isinstance(error, RankError) and (raised := find_raised_line(error.rank_traceback)) is not None:
        parts.append(f"at {raised.file}:{raised.line}" + (f"  {raised.text}" if raised.text else ""))
    parts += [_describe(each) for each in findings if each.code not in error.found]
    return ", ".join(parts)


def _describe(finding: Any) -> str:
    where = "" if finding.place is None else f", {finding.place.file}:{finding.place.line}"
    return _shorten(f"{finding.code} {finding.name}: {finding.summary}") + where


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."
