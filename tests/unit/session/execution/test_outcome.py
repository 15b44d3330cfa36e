# SPDX-License-Identifier: Apache-2.0
"""Collectives that only some ranks have called in a cell that succeeded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpilot.record.flight_ring.log import RankLog
from ddpilot.session.execution.outcome import CountMismatch, Outcome, Part, find_count_mismatches
from ddpilot.session.protocol.messages import Report
from tests.unit.watch.logs import Writer, group_of

WORLD = "0 0-1"


def outcome_of(*counts: Mapping[str, int], num_collectives: int = 1) -> Outcome:
    """A cell that succeeded on ranks with these counts."""
    reports = [Report(has_group=True, num_collectives=num_collectives, group_counts=each) for each in counts]
    return Outcome({rank: Part(rank, "", report=report) for rank, report in enumerate(reports)})


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> dict[int, RankLog]:
    """What the rings hold, by rank."""
    held: dict[int, RankLog] = {}
    monkeypatch.setattr(
        "ddpilot.session.execution.outcome.read_ring",
        lambda path, newest: held[int(path.stem.removeprefix("rank"))],
    )
    return held


def log_of(rank: int, lines: tuple[int, ...], **last: Any) -> RankLog:
    """A rank whose process id is 1, and that called all_reduce from these lines, the last one as `last` says."""
    writer = Writer(rank, group_of(0, 1))
    for line in lines[:-1]:
        writer.call("all_reduce", line)
    log: RankLog = writer.call("all_reduce", lines[-1], **last).log(pid=1)
    return log


def test_a_collective_that_one_rank_alone_called_is_described_with_its_line(
    logs: dict[int, RankLog], tmp_path: Path
) -> None:
    """Also if the group was rebuilt after it, and a later cell does the same."""
    logs[0] = log_of(0, (1, 2), state="begun")
    uneven = CountMismatch(tmp_path)
    assert uneven.describe(outcome_of({WORLD: 1}, {WORLD: 1})) == ""
    said = (
        "the ranks have begun different numbers of collectives in the default group: 2 on rank 0, 1 on rank 1; rank 1 "
        "did not call #1: all_reduce, train.py:2. It would be matched with a collective of a later cell: call it on "
        "all ranks"
    )
    for _ in range(2):
        assert uneven.describe(outcome_of({WORLD: 2}, {WORLD: 1})) == said


@pytest.mark.parametrize("last", [{"state": "failed"}, {"thread": 2}], ids=["failed", "thread"])
def test_a_collective_that_failed_or_that_a_thread_called_is_left_alone(
    logs: dict[int, RankLog], tmp_path: Path, last: dict[str, Any]
) -> None:
    """The thread may still be running on the other ranks."""
    logs[0] = log_of(0, (1, 2), **last)
    uneven = CountMismatch(tmp_path)
    assert uneven.describe(outcome_of({WORLD: 2}, {WORLD: 1})) == ""
    logs[0] = log_of(0, (1, 2, 3))
    assert uneven.describe(outcome_of({WORLD: 3}, {WORLD: 2})) == ""


def test_only_groups_that_all_of_their_ranks_have_are_compared() -> None:
    """Not a group of other ranks, nor one that a rank has destroyed."""
    reports = outcome_of({WORLD: 5, "1 0": 3, "2 0-1": 4}, {WORLD: 5, "1 1": 7}).parts
    assert find_count_mismatches({rank: part.report for rank, part in reports.items() if part.report is not None}) == {}
