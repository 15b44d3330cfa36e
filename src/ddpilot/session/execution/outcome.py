# SPDX-License-Identifier: Apache-2.0
"""Result of a cell, call or request on each of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpilot.errors import LaunchError, LaunchInterrupted, RankError
from ddpilot.launching.spawning import Ended
from ddpilot.session.protocol.messages import Report


@dataclass
class Part:
    """One rank's part of a cell, call or request."""

    rank: int
    message_id: str
    has_begun: bool = False
    """True if the rank has started it, so that an interrupt takes effect."""

    num_before: int | None = None
    """Number of collectives that the rank had begun before; None if not recorded."""

    report: Report | None = None
    is_idle: bool = False
    """True if the kernel has reported that all output of this part was sent."""

    ended: Ended | None = None

    @property
    def has_succeeded(self) -> bool:
        """True if the rank has reported success."""
        return self.report is not None and self.report.raised is None

    @property
    def is_over(self) -> bool:
        """True if no more messages of this part will arrive."""
        return self.ended is not None or (self.report is not None and self.is_idle)


@dataclass
class Outcome:
    """Result of a cell, call or request."""

    parts: dict[int, Part]
    error: RankError | LaunchError | None = None
    """The first failure in time; None on success or after an interrupt by the user."""

    was_interrupted: bool = False
    freed: dict[int, Report] = field(default_factory=dict)
    """By rank: the report on freeing it. Empty if no rank was freed."""

    is_group_intact: bool = False
    """True if it failed but the group is intact: no rank had begun a collective and all returned without being freed,
    or all had finished their part and the error is about its result."""

    has_mismatch: bool = False
    """True if it succeeded, but ranks have begun different numbers of collectives in a group, so that all were freed.
    """

    @property
    def was_aborted(self) -> bool:
        """True if a failure is known or the user interrupted it."""
        return self.error is not None or self.was_interrupted

    @property
    def busy(self) -> tuple[int, ...]:
        """Ranks whose part is not over."""
        return tuple(part.rank for part in self.parts.values() if not part.is_over)

    @property
    def unreported(self) -> tuple[int, ...]:
        """Ranks that have not reported how their part ended. The other `busy` ranks only have output left to send."""
        return tuple(part.rank for part in self.parts.values() if not part.is_over and part.report is None)

    @property
    def interruptible(self) -> tuple[int, ...]:
        """Ranks that have started their part and not finished it."""
        return tuple(part.rank for part in self.parts.values() if part.has_begun and not part.is_over)

    @property
    def values(self) -> dict[int, Any]:
        """By rank: the small value that a request returned; ranks that returned none are left out."""
        reports = {rank: part.report for rank, part in self.parts.items()}
        return {rank: report.value for rank, report in reports.items() if report is not None and report.value}

    def raise_failure(self, name: str) -> None:
        """Raise the failure of `name`: RankError or LaunchError, or LaunchInterrupted after an interrupt."""
        if self.error is not None:
            raise self.error
        if self.was_interrupted:
            ends = []
            for rank, part in sorted(self.parts.items()):
                if part.ended is not None:
                    ends.append(f"rank {rank} was killed")
                elif part.has_succeeded:
                    ends.append(f"rank {rank} finished")
                elif part.report is not None and part.report.raised is not None:
                    ends.append(f"rank {rank} raised {part.report.raised.type_name}")
            raise LaunchInterrupted(f"{name} was interrupted: {'; '.join(ends)}")
