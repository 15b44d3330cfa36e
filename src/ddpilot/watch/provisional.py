# SPDX-License-Identifier: Apache-2.0
"""Where ranks differ in their logs; to be replaced by the whole analysis of `stall`."""

from __future__ import annotations

from ddpilot.findings.finding import Finding, Place
from ddpilot.findings.sequence import Findings
from ddpilot.record.comparing import find_difference
from ddpilot.watch.stall import Analysis
from ddpilot.watch.view import JobView


def analyze(
    view: JobView,
    earlier: JobView | None = None,  # noqa: ARG001 - what the whole analysis takes
    *,
    stall_s: float = 2.0,  # noqa: ARG001
    stall_warn_s: float = 30.0,  # noqa: ARG001
) -> Analysis:
    """What ranks do not agree about."""
    logs = [each.log for each in view.ranks.values() if each.log is not None]
    difference = find_difference(logs)
    if difference is None or max(e.start_ns for e in difference.by_rank.values()) < view.since_ns:
        return Analysis(findings=Findings())
    sides = []
    for value, ranks in difference.clash.said:
        entry = difference.by_rank[ranks[0]]
        sides.append(f"{','.join(map(str, ranks))}: {entry.op} ({value}) {entry.line.place if entry.line else ''}")
    line = difference.by_rank[difference.clash.said[-1][1][0]].line
    return Analysis(
        findings=Findings(
            [
                Finding(
                    code="DDP201",
                    name="desync",
                    severity="error",
                    summary=f"collective #{difference.seq} differs between ranks",
                    ranks=tuple(sorted(difference.by_rank)),
                    place=None if line is None else Place(file=line.file, line=line.line, text=line.text),
                    evidence=tuple(sides),
                )
            ]
        ),
        is_stalled=True,
    )
