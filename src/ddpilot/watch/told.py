# SPDX-License-Identifier: Apache-2.0
"""Remember what was reported, so that each finding and each wait is reported once."""

from __future__ import annotations

from collections.abc import Iterable

from ddpilot.findings.finding import Finding
from ddpilot.watch.analysis import Analysis

_QUIET_S = 1.5
"""A wait that resumes after a shorter break than this is the same wait."""


class Told:
    """What one observer has reported. `again_s`: seconds after which a wait that persists is reported again."""

    def __init__(self, again_s: float) -> None:
        self._again_s = again_s
        self._keys: set[object] = set()
        self._due_s: float | None = None
        self._wait_s = again_s
        self._stalled_s: float | None = None

    def new_findings(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings that differ from all earlier ones."""
        news = []
        for finding in findings:
            if self._keys.isdisjoint(keys_of(finding)):
                news.append(finding)
            self._keys |= keys_of(finding)
        return news

    def new_status(self, analysis: Analysis, now_s: float) -> tuple[str, ...]:
        """Return the status lines when ranks begin to wait, and then at intervals that double; empty otherwise."""
        if not analysis.is_stalled or not analysis.status:
            if self._stalled_s is None or now_s - self._stalled_s >= _QUIET_S:
                self._due_s = None
            return ()
        self._stalled_s = now_s
        if self._due_s is not None and now_s < self._due_s:
            return ()
        self._wait_s = self._again_s if self._due_s is None else 2 * self._wait_s
        self._due_s = now_s + self._wait_s
        return analysis.status

    def once(self, text: str) -> str:
        """Return `text` the first time, and an empty string afterwards."""
        is_new = text not in self._keys
        self._keys.add(text)
        return text if is_new else ""


def keys_of(finding: Finding) -> set[object]:
    """Return the keys of a finding. Two findings that share one are the same: equal place, or equal summary."""
    return {(finding.code, finding.place or finding.summary), (finding.code, finding.summary)}


def newest(findings: Iterable[Finding]) -> list[Finding]:
    """Keep only the last of findings that are the same, in the position of the first."""
    kept: list[Finding] = []
    for finding in findings:
        same = next((at for at, each in enumerate(kept) if not keys_of(each).isdisjoint(keys_of(finding))), None)
        if same is None:
            kept.append(finding)
        else:
            kept[same] = finding
    return kept
