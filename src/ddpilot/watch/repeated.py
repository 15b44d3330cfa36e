# SPDX-License-Identifier: Apache-2.0
"""Suppress findings about a model's layers in cells that train the same model again."""

from __future__ import annotations

from collections.abc import Iterable

from ddpilot.findings.finding import Finding

_OF_LAYERS = frozenset({"DDP408"})
"""Codes that describe the model and not the cell; their evidence names layers and numbers."""

_Key = tuple[str, tuple[str, ...]]


class Repeated:
    """Remembers findings about layers shown by earlier cells. Findings with other layers or numbers count as new."""

    def __init__(self) -> None:
        self._earlier: set[_Key] = set()
        self._now: set[_Key] = set()

    def begin(self) -> None:
        """Start a new cell."""
        self._earlier |= self._now
        self._now = set()

    def without(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return `findings` without those shown by an earlier cell; the rest counts as shown in this cell."""
        kept = [each for each in findings if each.code not in _OF_LAYERS or _key(each) not in self._earlier]
        self._now.update(_key(each) for each in kept if each.code in _OF_LAYERS)
        return kept


def _key(finding: Finding) -> _Key:
    return finding.code, finding.evidence  # the same whichever ranks have come that far
