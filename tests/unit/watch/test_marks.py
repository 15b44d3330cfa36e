# SPDX-License-Identifier: Apache-2.0
"""Marks of two nodes: alike where their ranks agree, however far each has come, and different where they do not."""

from __future__ import annotations

import json

import pytest

from ddpilot.watch.marks import Marks
from tests.unit.watch.logs import S, Writer, group_of

WORLD = group_of(0, 1)
LATER = 10**6 * S


def calls(rank: int, num: int, odd: int | None = None, **how: object) -> Writer:
    """A rank that has called that many collectives, of which the one with the number `odd` is different."""
    writer = Writer(rank, WORLD)
    for number in range(num):
        writer.call("all_reduce", 5, **(how if number == odd else {}))
    return writer


def marks_of(writer: Writer, *, step: int = 100) -> Marks:
    """Fed as the log grows."""
    marks, log = Marks(), writer.log()
    for end in range(step, len(log.collectives) + step, step):
        marks.feed([writer.log(collectives=log.collectives[max(0, end - 300) : end])], LATER)
    return marks


@pytest.mark.parametrize(("num_here", "num_there"), [(1, 1), (40, 43), (1000, 1300), (2047, 2049), (5000, 5000)])
def test_marks_are_alike_where_ranks_agree(num_here: int, num_there: int) -> None:
    """At whatever count each of them stands."""
    here, there = marks_of(calls(0, num_here)), marks_of(calls(1, num_there), step=70)
    assert not here.find_different(there.encode())
    assert not there.find_different(here.encode())


@pytest.mark.parametrize("how", [{"reduce_op": "MAX"}, {"op": "barrier"}, {"root": 1}, {"inputs": ()}])
@pytest.mark.parametrize(("num_here", "num_there", "odd"), [(7, 7, 6), (40, 43, 3), (5000, 5100, 4900)])
def test_marks_differ_from_where_ranks_do_not_agree(
    num_here: int, num_there: int, odd: int, how: dict[str, object]
) -> None:
    """Also where it was but one collective, and both have gone on."""
    more = dict(how)
    op = more.pop("op", "all_reduce")
    writer = Writer(1, WORLD)
    for number in range(num_there):
        writer.call(str(op) if number == odd else "all_reduce", 5, **(more if number == odd else {}))
    here, there = marks_of(calls(0, num_here)), marks_of(writer)
    (name,) = here.find_different(there.encode())
    assert there.find_different(here.encode()) == {name}


def test_marks_of_another_window_are_alike_again() -> None:
    """What was different is told once, not for ever."""
    here, there = marks_of(calls(0, 1500)), marks_of(calls(1, 1500, odd=3, reduce_op="MAX"))
    assert here.find_different(there.encode())  # the one at the end of the first window
    here, there = marks_of(calls(0, 3000)), marks_of(calls(1, 3000, odd=3, reduce_op="MAX"))
    assert not here.find_different(there.encode())


def test_marks_wait_for_the_reduce_op() -> None:
    """It is written some time after the collective has begun."""
    writer = calls(0, 3)
    marks = Marks()
    marks.feed([writer.log()], 101 * S + S // 50)
    assert [max(map(int, said)) for said in json.loads(marks.encode()).values()] == [2]


def test_marks_skip_what_could_not_be_read() -> None:
    """Up to the next window: no difference is made up."""
    log = calls(0, 1100).log()
    gap = Marks()
    gap.feed([calls(0, 0).log(collectives=log.collectives[:50] + log.collectives[60:1000])], LATER)
    whole = marks_of(calls(1, 1000))
    assert not gap.find_different(whole.encode())
    gap.feed([calls(0, 0).log(collectives=log.collectives[1000:])], LATER)
    assert not gap.find_different(marks_of(calls(1, 1100)).encode())
    assert gap.find_different(marks_of(calls(1, 1100, odd=1060, reduce_op="MAX")).encode())


def test_marks_of_ranks_of_one_node_are_those_of_one_of_them() -> None:
    """They are compared with each other by their logs."""
    marks = Marks()
    marks.feed([calls(0, 9).log(), calls(1, 5).log()], LATER)
    assert not marks.find_different(marks_of(calls(2, 9)).encode())
    assert len(marks.encode()) < 400
