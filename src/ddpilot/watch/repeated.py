# SPDX-License-Identifier: Apache-2.0
"""Findings about a model's layers, which every further cell that trains the model would show again."""

from __future__ import annotations

from collections.abc import Iterable

from ddpilot.findings.finding import Finding

_OF_LAYERS = frozenset({"DDP408"})
"""Codes of what a model is, not of what a cell does; their evidence names layers and numbers."""

_Key = tuple[str, tuple[int, ...], tuple[str, ...]]


class Repeated:
    """Remembers which findings about layers earlier cells have shown. With other layers or numbers they are new."""

    def __init__(self) -> None:
        self._earlier: set[_Key] = set()
        self._now: set[_Key] = set()

    def begin(self) -> None:
        """A cell starts."""
        self._earlier |= self._now
        self._now = set()

    def without(self, findings: Iterable[Finding]) -> list[Finding]:
        """`findings` without those that an earlier cell has shown; the rest counts as shown in this one."""
        kept = [each for each in findings if each.code not in _OF_LAYERS or _key(each) not in self._earlier]
        self._now.update(_key(each) for each in kept if each.code in _OF_LAYERS)
        return kept


def _key(finding: Finding) -> _Key:
    return finding.code, finding.ranks, finding.evidence
