# SPDX-License-Identifier: Apache-2.0
"""The order of findings wherever they are shown: errors first, equal ones together, consequences under their cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ddpilot.findings.finding import SEVERITIES, Finding

_Key = tuple[str, str, str, str]

_LOCAL_GRADIENTS = frozenset({"DDP321", "DDP322", "DDP323", "DDP324", "DDP327", "DDP329"})
CAUSES: Mapping[str, frozenset[str]] = {
    "DDP105": frozenset({"DDP103", "DDP104", "DDP106"}),
    "DDP215": frozenset({"DDP103", "DDP104"}),
    "DDP320": _LOCAL_GRADIENTS,
    "DDP324": _LOCAL_GRADIENTS - {"DDP324"},
    "DDP607": frozenset({"DDP601"}),
    "DDP703": frozenset({"DDP118", "DDP119"}),
    "DDP704": frozenset({"DDP118"}),
    "DDP822": frozenset({"DDP401", "DDP403", "DDP415"}),
    "DDP825": frozenset({"DDP405", "DDP406", "DDP411"}),
}
"""By code, the codes that explain it if they are found in the same job."""


@dataclass(frozen=True)
class Group:
    """Findings with one code and one fix, and the groups that they explain."""

    members: tuple[Finding, ...]
    """At least one, by rank and place."""
    consequences: tuple[Group, ...] = ()

    def __iter__(self) -> Iterator[Finding]:
        yield from self.members
        for group in self.consequences:
            yield from group


def sort_findings(findings: Iterable[Finding], *, is_ranked: bool = False) -> tuple[Finding, ...]:
    """Return the findings in the order in which they are shown; `explained_by` is set where the cause is among them."""
    return tuple(finding for group in group_findings(findings, is_ranked=is_ranked) for finding in group)


def group_findings(findings: Iterable[Finding], *, is_ranked: bool = False) -> tuple[Group, ...]:
    """Group findings by severity, code and fix, and place groups under the one that explains them.

    Errors come first, then warnings, then infos; in each by code, and in a group by rank and place. A cause has the
    place of its most severe consequence. `is_ranked`: the order given is that of importance, and groups keep it.
    """
    known = tuple(findings)
    codes = {each.code for each in known}
    by_key: dict[_Key, list[Finding]] = {}
    for each in known:
        cause = _find_cause(each, codes)
        marked = each if not cause or cause == each.explained_by else replace(each, explained_by=cause)
        by_key.setdefault((each.severity, each.code, each.fix, cause), []).append(marked)
    order = {key: at for at, key in enumerate(by_key if is_ranked else sorted(by_key, key=_rank_key))}
    roots = _find_roots(sorted(order, key=order.__getitem__))
    below: dict[_Key, list[_Key]] = {}
    for key in by_key:
        below.setdefault(roots[key], []).append(key)
    groups = {}
    for root, keys in below.items():
        ordered = [root, *sorted((key for key in keys if key != root), key=order.__getitem__)]
        first, *rest = (tuple(sorted(by_key[key], key=_place_key)) for key in ordered)
        groups[min(order[key] for key in keys)] = Group(first, tuple(map(Group, rest)))
    return tuple(groups[at] for at in sorted(groups))


def _find_cause(finding: Finding, codes: set[str]) -> str:
    """Return the code, among `codes`, of what explains `finding`; empty if nothing does."""
    if finding.explained_by:
        return finding.explained_by if finding.explained_by in codes - {finding.code} else ""
    return min(CAUSES.get(finding.code, frozenset()) & codes, default="")


def _find_roots(keys: Sequence[_Key]) -> dict[_Key, _Key]:
    """Map each key to that of its first cause; a circle of causes has none."""
    by_code: dict[str, _Key] = {}
    for key in keys:
        by_code.setdefault(key[1], key)
    roots = {}
    for key in keys:
        seen = [key]
        while seen[-1][3] and seen[-1] not in seen[:-1]:
            seen.append(by_code[seen[-1][3]])
        roots[key] = key if seen[-1] in seen[:-1] else seen[-1]
    return roots


def _rank_key(key: _Key) -> tuple[int, str, str]:
    severity, code, fix, _ = key
    return SEVERITIES.index(severity), code, fix


def _place_key(finding: Finding) -> tuple[tuple[int, ...], tuple[str, int], str]:
    place = finding.place.position if finding.place is not None else ("", 0)
    return tuple(sorted(finding.ranks)), place, finding.summary
