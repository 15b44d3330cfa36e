# SPDX-License-Identifier: Apache-2.0
"""What became of a cell, call or request on each of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpilot.errors import LaunchError, LaunchInterrupted, RankError
from ddpilot.session.events import Ended
from ddpilot.session.report import Report


@dataclass
class Part:
    """One rank's part of a round."""

    rank: int
    message_id: str
    has_begun: bool = False
    """Whether the rank is at it, so that a stop reaches it."""

    num_before: int | None = None
    """How many collectives the rank had begun before; None where they are not recorded."""

    report: Report | None = None
    is_idle: bool = False
    """Whether the kernel has said that all output of this part was sent."""

    ended: Ended | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.ended is not None or (self.report is not None and self.is_idle)


@dataclass
class Outcome:
    """What became of a round."""

    parts: dict[int, Part]
    error: RankError | LaunchError | None = None
    """The first failure in time; None where all went well or a person stopped it."""

    was_stopped: bool = False
    freed: dict[int, Report] = field(default_factory=dict)
    """By rank: what freeing it found. Empty where nothing was freed."""

    spared_group: bool = False
    """It went wrong, but the group is as it was: none had begun a collective and all came back by themselves, or all
    had done their part and the error is about what they did."""

    @property
    def is_ok(self) -> bool:
        """Whether every rank did its part."""
        return not self.was_cut

    @property
    def was_cut(self) -> bool:
        """Whether it is known that it failed, or a person stopped it."""
        return self.error is not None or self.was_stopped

    @property
    def busy(self) -> tuple[int, ...]:
        """The ranks whose part is not over."""
        return tuple(part.rank for part in self.parts.values() if not part.is_over)

    @property
    def at_work(self) -> tuple[int, ...]:
        """The ranks that have not said how their part ended; of those that have, only output may still come."""
        return tuple(part.rank for part in self.parts.values() if not part.is_over and part.report is None)

    @property
    def interruptible(self) -> tuple[int, ...]:
        """The ranks that are at their part now."""
        return tuple(part.rank for part in self.parts.values() if part.has_begun and not part.is_over)

    @property
    def values(self) -> dict[int, Any]:
        """By rank: what a request answers with a small value; those that answer with none are left out."""
        reports = {rank: part.report for rank, part in self.parts.items()}
        return {rank: report.value for rank, report in reports.items() if report is not None and report.value}

    def raise_failure(self, name: str) -> None:
        """Raise what `name` ended with: RankError or LaunchError, or LaunchInterrupted after the stop button."""
        if self.error is not None:
            raise self.error
        if self.was_stopped:
            ends = []
            for rank, part in sorted(self.parts.items()):
                if part.ended is not None:
                    ends.append(f"rank {rank} had to be killed")
                elif part.report is not None and part.report.status == "ok":
                    ends.append(f"rank {rank} finished")
                elif part.report is not None:
                    ends.append(f"rank {rank} ended at {part.report.type_name}")
            raise LaunchInterrupted(f"{name} was stopped: {'; '.join(ends)}")
