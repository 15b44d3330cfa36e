# SPDX-License-Identifier: Apache-2.0
"""Result of a cell or request on each rank, and groups in which ranks have begun different numbers of collectives."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpilot.errors import LaunchError, LaunchInterrupted, RankError, RecordError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.spawning import Ended
from ddpilot.module_names import GROUP_FOLDER
from ddpilot.record.flight_ring.log import Collective, pack_ranks, unpack_ranks
from ddpilot.record.flight_ring.reader import NUM_NEWEST, read_ring
from ddpilot.record.hook import ring_path
from ddpilot.session.protocol.messages import Report
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.text import name_group, render_call


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


_RECORDED_LATE_S = 0.15
_PAUSE_S = 0.01
_GROUP_CODE = ("/torch/distributed/", GROUP_FOLDER)
_NUM_NEWEST = 256
"""Number of a rank's newest records that are searched for the collectives that other ranks have not called."""

Counts = dict[str, dict[int, int]]
"""By group and rank: number of collectives begun."""


def has_unfinished(folder: Path, rank: int, *, p2p_only: bool = False) -> bool:
    """True if the rank has an unfinished collective, or if that is unknown. Ends are recorded up to 50 ms late.

    With `p2p_only`, only sends and receives count: a collective that all ranks have begun finishes on its own.
    """
    limit_s = time.monotonic() + _RECORDED_LATE_S
    while True:
        try:
            newest = read_ring(ring_path(folder, rank), newest=NUM_NEWEST).collectives
        except (RecordError, OSError):
            return True
        is_unfinished = any(each.state == "begun" and (each.is_p2p or not p2p_only) for each in newest)
        if not is_unfinished or time.monotonic() > limit_s:
            return is_unfinished
        time.sleep(_PAUSE_S)


def is_in_group_code(frames: Sequence[CodeLine] | None) -> bool:
    """True if a main thread with these frames is in code that may wait for other ranks, or if they are unknown."""
    return frames is None or any(part in frame.file for frame in frames for part in _GROUP_CODE)


def find_count_mismatches(reports: Mapping[int, Report]) -> Counts:
    """Return the groups whose ranks have begun different numbers of collectives.

    Only groups that every one of their ranks has reported are compared.
    """
    by_group: Counts = {}
    for rank, report in reports.items():
        for key, count in report.group_counts.items():
            by_group.setdefault(key, {})[rank] = count
    return {
        key: counts
        for key, counts in by_group.items()
        if len(set(counts.values())) > 1 and all(rank in counts for rank in unpack_ranks(key.rpartition(" ")[2]))
    }


class CountMismatch:
    """Describes collectives of a cell that only some ranks have called; the flight rings are in `folder`.

    Ranks match collectives by their order, so that such a collective would be matched with one of a later cell.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: Counts = {}

    def describe(self, outcome: Outcome) -> str:
        """Return a message about the first group that became uneven in the cell of `outcome`; "" if there is none.

        A group is left alone if a collective that some ranks have not called failed, or was called by a thread other
        than the main one: such a thread may still be running on the other ranks.
        """
        reports = {rank: part.report for rank, part in outcome.parts.items() if part.report is not None}
        if len(reports) < len(outcome.parts) or not any(report.num_collectives for report in reports.values()):
            return ""
        before, self._known = self._known, find_count_mismatches(reports)
        for key, counts in self._known.items():
            if _leads(counts) == _leads(before.get(key, {})):
                continue
            least = min(counts.values())
            ahead = [self._find_extra(rank, key, least) for rank, count in counts.items() if count > least]
            if all(ahead):
                self._known = {}  # the groups are rebuilt
                return _say(counts, ahead[0][0])
        return ""

    def _find_extra(self, rank: int, key: str, least: int) -> list[Collective]:
        """Return the collectives of the group that `rank` has begun after the first `least` ones, oldest first.

        Empty if one of them failed or was called by a thread other than the main one.
        """
        try:
            log = read_ring(ring_path(self._folder, rank), newest=_NUM_NEWEST)
        except (RecordError, OSError):
            return []
        by_age: dict[tuple[int, int], list[Collective]] = {}
        for each in log.collectives:
            group = each.group
            if each.seq is not None and group is not None and f"{group.name} {pack_ranks(group.ranks)}" == key:
                by_age.setdefault(group.generation, []).append(each)
        newest = by_age[max(by_age)] if by_age else []
        extra = [each for each in newest if each.seq is not None and each.seq >= least]
        return [] if any(each.state == "failed" or each.thread != log.pid for each in extra) else extra


def _leads(counts: Mapping[int, int]) -> dict[int, int]:
    """Return by rank how many more collectives it has begun than the rank that has begun the fewest."""
    return {rank: count - min(counts.values()) for rank, count in counts.items()}


def _say(counts: Mapping[int, int], first: Collective) -> str:
    by_count: dict[int, list[int]] = {}
    for rank, count in counts.items():
        by_count.setdefault(count, []).append(rank)
    said = ", ".join(f"{count} on {render_ranks(ranks)}" for count, ranks in sorted(by_count.items(), reverse=True))
    behind = render_ranks(by_count[min(by_count)])
    group = "a group" if first.group is None else name_group(first.group)
    return (
        f"the ranks have begun different numbers of collectives in {group}: {said}; {behind} did not call "
        f"#{first.seq}: {render_call(first)}. It would be matched with a collective of a later cell: call it on all "
        "ranks"
    )
