# SPDX-License-Identifier: Apache-2.0
"""The analysis of one snapshot while it is made: what is known, and the findings and waits so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ddpilot.findings.finding import Finding
from ddpilot.source.parsed_file import Sources
from ddpilot.watch.matching.outcomes import RankOutcome
from ddpilot.watch.snapshot.model import JobSnapshot, RankSnapshot


@dataclass(slots=True, kw_only=True)
class Draft:
    """What is known of a job, and what was found."""

    job: JobSnapshot
    earlier: JobSnapshot | None
    outcomes: dict[int, RankOutcome]
    sources: Sources
    stall_ns: int
    """How long ranks may wait before an unproven wait becomes a status line."""
    warn_ns: int
    """How long ranks may wait before an unproven wait becomes a warning."""
    findings: list[Finding] = field(default_factory=list)
    status: list[str] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)
    """Ranks whose stacks show more."""
    explained: set[int] = field(default_factory=set)
    """Ranks whose end is explained by a finding."""
    silent: list[Finding] = field(default_factory=list)
    """The findings, among `findings`, that make no rank fail or wait."""
    is_stalled: bool = False

    @property
    def is_interrupted(self) -> bool:
        """True if a rank ended with KeyboardInterrupt, as all ranks of a terminal do on Ctrl-C."""
        errors = (rank.error for rank in self.job.ranks.values())
        return any(error is not None and error.type_name == "KeyboardInterrupt" for error in errors)

    def before(self, rank: int) -> RankSnapshot | None:
        """Return the state of `rank` in the earlier snapshot; None if it is unknown."""
        return self.earlier.ranks.get(rank) if self.earlier is not None else None

    def add_proven(self, finding: Finding, explained: Iterable[int], needs: Iterable[int] = ()) -> None:
        """Add a finding about ranks that cannot continue. `needs`: ranks whose stacks show more."""
        self.is_stalled = True
        self.findings.append(finding)
        self.explained.update(explained)
        self.needs.update(needs)

    def add_status(self, line: str) -> None:
        """Add a line about an unproven wait."""
        self.is_stalled = True
        self.status.append(line)
