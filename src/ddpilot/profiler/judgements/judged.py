# SPDX-License-Identifier: Apache-2.0
"""`Judged`: a finding with the factor by which updates would be faster without its cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding, Severity
from ddpilot.profiler.phases import Phases
from ddpilot.user_files import CodeLine

SMALL_SHARE = 0.05
"""A smaller part of an update is not worth a finding: measurements differ by as much."""
_LEAST_LEFT = 0.05
"""Part of an update that is left at least, whatever ends."""


@dataclass(frozen=True)
class Judged:
    """A finding, and the factor by which updates would be faster without its cause."""

    finding: Finding
    factor: float


def judged(
    code: str,
    summary: str,
    *,
    saved_s: float,
    total_s: float,
    ranks: tuple[int, ...] = (),
    line: CodeLine | None = None,
    evidence: tuple[str, ...] = (),
    fix: str = "",
    severity: Severity | None = None,
) -> Judged:
    """Return the finding of `code` with what it would give: `saved_s` of the `total_s` of an update."""
    left_s = max(total_s - saved_s, _LEAST_LEFT * total_s)
    factor = total_s / left_s
    more = f"without it an update takes about {ms(left_s)}: {factor:.2f}x as fast"
    finding = make_finding(
        code, summary=summary, ranks=ranks, line=line, evidence=(*evidence, more), fix=fix, severity=severity
    )
    return Judged(finding, factor)


def lines_of(phases: Phases, name: str) -> Iterator[tuple[CodeLine, list[float]]]:
    """Yield the lines with time in a phase, and the mean seconds of an update on each rank; the longest first."""
    lines: dict[CodeLine, list[float]] = {}
    for place, by_line in enumerate(phases.by_line):
        for (phase, line), seconds in by_line.items():
            if phase == name:
                lines.setdefault(line, [0.0] * len(phases.ranks))[place] = seconds
    yield from sorted(lines.items(), key=lambda item: -max(item[1]))


def longest_line(phases: Phases, name: str, place: int) -> CodeLine | None:
    """Return the line that takes most of the time of a phase on one rank; None if most of it has no line."""
    total_s = float(phases.share(name)[place].mean())
    for line, seconds in sorted(lines_of(phases, name), key=lambda item: -item[1][place]):
        return line if seconds[place] > total_s / 2 else None
    return None


def core_wait_s(phases: Phases) -> float:
    """Return how long a rank waits for a core in an update, on average: differences below that are noise."""
    return float(phases.counts["core_wait_ns"].mean()) / 1e9 if phases.counts.size else 0.0


def longest_core_wait_s(phases: Phases) -> float:
    """Return how long the rank that waits most for a core does so in an update, on average."""
    return float(phases.counts["core_wait_ns"].mean(axis=1).max()) / 1e9 if phases.counts.size else 0.0


def ms(seconds: float) -> str:
    """Return milliseconds with three digits."""
    return f"{seconds * 1e3:.3g} ms"
