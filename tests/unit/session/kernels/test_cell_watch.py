# SPDX-License-Identifier: Apache-2.0
"""Observing one cell from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot.record.flight_ring import layout
from ddpilot.record.hook import ring_path
from ddpilot.session.kernels.cell_watch import SubsetObserver, as_counted
from tests.unit.record.rings import begin, open_ring


@pytest.mark.parametrize(
    ("code", "counted"),
    [("\n  \nx = 1\n\ny = 2\n", "x = 1\n\ny = 2\n"), ("x = 1", "x = 1"), ("\n", "")],
)
def test_lines_of_a_cell_are_counted_from_the_first_that_is_not_empty(code: str, counted: str) -> None:
    """As IPython does, so that the lines of collectives are found in it."""
    assert as_counted(code) == counted


WATCHED = layout.ASKED_ANY_TIME


def looks(folder: Path, ranks: tuple[int, ...], others: tuple[int, ...], at_s: tuple[float, ...]) -> list[str]:
    """The notes of an observer that looks at these times; the cell begins at the first one."""
    notes: list[str] = []
    bystanders = SubsetObserver(ranks, others, folder=folder, name="Cell In[7]", note=notes.append)
    for now_s in at_s:
        bystanders.look(ranks, now_s)
    return notes


def test_a_collective_that_others_must_call_is_noted_once(tmp_path: Path) -> None:
    """By name, with the line, and not before it has waited."""
    begin(open_ring(ring_path(tmp_path, 0)), 10**9, flags=WATCHED)
    assert looks(tmp_path, (0,), (1,), (1.0, 2.5, 3.9)) == []
    (note,) = looks(tmp_path, (0,), (1,), (1.0, 4.1, 5.2, 6.3))
    assert note == (
        "rank 0 waits in all_reduce of Cell In[7], train.py, line 88, which every rank must call, but the cell runs on "
        "rank 0 only: interrupt it and run it on all ranks"
    )


def test_a_group_whose_members_all_run_the_cell_is_not_accused(tmp_path: Path) -> None:
    """The group of the ring is that of ranks 0 and 1."""
    begin(open_ring(ring_path(tmp_path, 0)), 10**9, flags=WATCHED)
    assert looks(tmp_path, (0, 1), (2, 3), (1.0, 4.1, 5.2)) == []


def test_a_rank_that_has_begun_its_part_before_is_not_accused(tmp_path: Path) -> None:
    """It began it in an earlier cell, and did not wait."""
    begin(open_ring(ring_path(tmp_path, 0)), 10**9, seq=2, flags=WATCHED)
    other = open_ring(ring_path(tmp_path, 1))
    begin(other, 10**8, seq=1, flags=WATCHED)
    assert len(looks(tmp_path, (0,), (1,), (1.0, 4.1))) == 1
    begin(other, 10**8, seq=2, flags=WATCHED)
    assert looks(tmp_path, (0,), (1,), (1.0, 4.1)) == []


def test_a_collective_that_just_began_is_not_accused(tmp_path: Path) -> None:
    """However long the cell runs already."""
    begin(open_ring(ring_path(tmp_path, 0)), 99 * 10**9, flags=WATCHED)
    assert looks(tmp_path, (0,), (1,), (1.0, 100.0)) == []
    assert len(looks(tmp_path, (0,), (1,), (1.0, 101.5))) == 1


def test_what_may_be_over_is_accused_only_where_another_has_surely_not_begun_it(tmp_path: Path) -> None:
    """The backend does not report the end of a collective; the ring of the other rank shows it, if there is one."""
    begin(open_ring(ring_path(tmp_path, 0)), 10**9, seq=1)
    assert looks(tmp_path, (0,), (1,), (1.0, 4.1)) == []
    begin(open_ring(ring_path(tmp_path, 1)), 10**8, seq=0)
    assert len(looks(tmp_path, (0,), (1,), (1.0, 4.1))) == 1


def test_no_warning_if_collectives_are_not_recorded(tmp_path: Path) -> None:
    """Without a ring nothing is known."""
    assert looks(tmp_path, (0,), (1,), (1.0, 4.1, 5.2)) == []
