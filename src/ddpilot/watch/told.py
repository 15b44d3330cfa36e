# SPDX-License-Identifier: Apache-2.0
"""What was told already: each finding once, and each thing that a job waits for once while it lasts."""

from __future__ import annotations

from collections.abc import Iterable

from ddpilot.findings.finding import Finding
from ddpilot.watch.stall import Analysis


class Told:
    """Remembers for one observer. `again_s`: seconds after which a wait that lasts is told once more."""

    def __init__(self, again_s: float) -> None:
        self._again_s = again_s
        self._keys: set[object] = set()
        self._due_s: float | None = None
        self._wait_s = again_s

    def new_findings(self, findings: Iterable[Finding]) -> list[Finding]:
        """Those of which there was none of the same code, place and ranks."""
        news = []
        for finding in findings:
            if key_of(finding) not in self._keys:
                self._keys.add(key_of(finding))
                news.append(finding)
        return news

    def new_status(self, analysis: Analysis, now_s: float) -> tuple[str, ...]:
        """The status, where ranks have just begun to wait, and ever more seldom while they do."""
        if not analysis.is_stalled or not analysis.status:
            self._due_s = None
            return ()
        if self._due_s is not None and now_s < self._due_s:
            return ()
        self._wait_s = self._again_s if self._due_s is None else 2 * self._wait_s
        self._due_s = now_s + self._wait_s
        return analysis.status

    def once(self, text: str) -> str:
        """`text`, the first time; empty afterwards."""
        is_new = text not in self._keys
        self._keys.add(text)
        return text if is_new else ""


def key_of(finding: Finding) -> object:
    """What two findings have in common that say the same."""
    return finding.code, finding.place, finding.ranks
