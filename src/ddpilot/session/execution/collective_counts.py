# SPDX-License-Identifier: Apache-2.0
"""Find process groups in which ranks have begun different numbers of collectives when a cell has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpilot.errors import RecordError
from ddpilot.findings.text import render_ranks
from ddpilot.module_names import GROUP_FOLDER
from ddpilot.record.flight_ring.groups import pack_ranks, unpack_ranks
from ddpilot.record.flight_ring.log import Collective
from ddpilot.record.flight_ring.reader import NUM_NEWEST, read_ring
from ddpilot.record.hook import ring_path
from ddpilot.session.execution.outcome import Outcome
from ddpilot.session.protocol.messages import Report
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.text import name_group, render_call

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
