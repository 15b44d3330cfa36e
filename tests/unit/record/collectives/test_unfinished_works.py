# SPDX-License-Identifier: Apache-2.0
"""Which works are polled when, and which are no longer followed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpilot.record.collectives.unfinished_works import (
    MANY_BYTES,
    MAX_BYTES,
    MAX_WORKS,
    REDUCE_OP_STEP,
    TURN_NS,
    RecordTemplate,
    StreamMark,
    UnfinishedWorks,
)
from ddpilot.record.flight_ring.reader import read_ring
from tests.unit.record.rings import begin, open_ring


class Work:
    """Stands for torch's work: finished when set so; `error` is raised by its future."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_over = False
        self.error = error
        self.num_asked = 0

    def is_completed(self) -> bool:
        """Whether it is over."""
        self.num_asked += 1
        return self.is_over

    def get_future(self) -> Work:
        """Itself."""
        return self

    def value(self) -> None:
        """Nothing, or its error."""
        if self.error:
            raise self.error

    wait = value

    def done(self) -> bool:
        """Whether it is over."""
        return self.is_over


class Event:
    """Stands for torch's event: reached when set so."""

    def __init__(self) -> None:
        self.is_reached = False

    def query(self) -> bool:
        """Whether it is reached."""
        return self.is_reached


class Case:
    """Pending works on a small ring."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.capturing = self.coalescing = False
        self.marks: list[Event] = []
        self.now_ns = 1000
        self.ring = open_ring(path, num_records=2 * MAX_WORKS)
        self.pending = UnfinishedWorks(
            self.ring,
            unbox=lambda boxed: boxed,
            is_capturing=lambda: self.capturing,
            mark_stream=self.mark_stream,
            clock_ns=lambda: self.now_ns,
        )

    def mark_stream(self) -> StreamMark | None:
        """A mark on the stream, unless calls are coalesced."""
        if self.coalescing:
            return None
        self.marks.append(Event())
        return StreamMark(self.marks[-1])

    def add(
        self,
        work: Work | None,
        *,
        at_any_time: bool = True,
        thread: int = 4711,
        reduce_op: Any = None,
        **more: Any,
    ) -> None:
        """Begin a collective with this work. `more`: fields of its template."""
        usual = self.template(at_any_time=at_any_time, **more)
        self.pending.add((begin(self.ring, 100), usual, thread, reduce_op), work)

    def template(self, *, at_any_time: bool = True, **more: Any) -> RecordTemplate:
        """What collectives that are alike share. `more`: its fields."""
        fields: dict[str, Any] = {"num_bytes": 8, "group": 1, "reports_failure": True, "is_waited_for": False, **more}
        fields.setdefault("may_be_waited_for", fields["is_waited_for"])
        return RecordTemplate(packed=b"", at_any_time=at_any_time, may_be_captured=not at_any_time, **fields)

    def states(self) -> list[str]:
        """Of all records."""
        return [entry.state for entry in read_ring(self.path).collectives]


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    """Nothing pending."""
    case = Case(tmp_path / "ring")
    yield case
    case.ring.close(1)


def test_works_are_marked_when_they_are_over(case: Case) -> None:
    """In any order, with their outcome; a pending one is marked as pending, and a finished one is not polled again."""
    works = [Work(), Work(RuntimeError("connection closed")), Work()]
    for work in works:
        case.add(work)
    assert [work.num_asked for work in works] == [0, 0, 0]
    case.pending.catch_up()
    assert case.states() == ["begun"] * 3
    assert all(entry.pending_ns for entry in read_ring(case.path).collectives)
    works[1].is_over = works[2].is_over = True
    for _ in range(2):
        case.pending.catch_up()
    assert case.states() == ["begun", "failed", "done"]
    assert [work.num_asked for work in works] == [3, 2, 2]


def test_works_that_may_not_be_asked_at_any_time_are_asked_by_who_starts_more(case: Case) -> None:
    """As with NCCL: never from the polling thread, never during a CUDA graph capture, otherwise once a millisecond."""
    first, second = Work(), Work()
    case.add(first, at_any_time=False)
    case.pending.catch_up()
    assert first.num_asked == 0
    first.is_over = True
    case.now_ns += TURN_NS + 1
    case.capturing = True
    case.add(second, at_any_time=False)
    assert first.num_asked == 0
    assert case.states() == ["begun", "unknown"]
    case.capturing = False
    case.add(Work(), at_any_time=False)
    assert case.states() == ["done", "unknown", "begun"]
    third = Work()
    case.add(third, at_any_time=False)
    assert third.num_asked == 0  # its turn comes with those that start now


def test_large_works_of_another_backend_are_asked_by_who_starts_more(case: Case) -> None:
    """A job may use NCCL and gloo: works of one do not hold up works of the other."""
    large = Work()
    case.add(large, num_bytes=MAX_BYTES + 1, at_any_time=False)
    large.is_over = True
    case.add(Work())
    assert case.states() == ["done", "begun"]
    assert large.num_asked == 1


def test_works_whose_tensors_are_large_are_asked_by_who_starts_more(case: Case) -> None:
    """So that memory which the program has released is not kept until the next poll."""
    large = Work()
    large.is_over = True
    case.add(large, num_bytes=MANY_BYTES + 1)
    case.add(Work())
    assert case.states() == ["done", "begun"]


def test_only_the_newest_of_each_group_is_followed_when_too_much_is_pending(case: Case) -> None:
    """One that is replaced by a newer one is unknown and was seen pending; there is room again when the first ends."""
    stuck, first, second, third, elsewhere = Work(), Work(), Work(), Work(), Work()
    case.add(stuck, num_bytes=MAX_BYTES + 1)
    for work in (first, second):
        case.add(work)
    case.add(elsewhere, group=2)
    case.add(Work(), group=-1)  # point-to-point, in no group's order
    assert case.states() == ["begun", "unknown", "begun", "begun", "unknown"]
    assert [entry.pending_ns for entry in read_ring(case.path).collectives if entry.state == "unknown"] == [1000, 1000]
    second.is_over = True
    case.add(third)
    assert case.states() == ["begun", "unknown", "done", "begun", "unknown", "begun"]
    for work in (stuck, third, elsewhere):
        work.is_over = True
    case.pending.catch_up()
    case.add(Work())
    assert case.states() == ["done", "unknown", "done", "done", "unknown", "done", "begun"]


def test_what_was_passed_over_is_done_when_a_newer_one_is(case: Case) -> None:
    """A backend such as NCCL runs a group's collectives in order, and threads that start more of them poll it."""
    works = [Work() for _ in range(8)]
    for work in works:
        case.add(work, num_bytes=MAX_BYTES // 2, at_any_time=False, reports_failure=False)
    assert case.states() == ["begun"] * 3 + ["unknown"] * 4 + ["begun"]
    case.capturing = True
    case.add(Work(), at_any_time=False)  # becomes part of a graph
    assert sum(work.num_asked for work in works[3:-1]) == 4
    case.capturing = False
    for work in works:
        work.is_over = True
    case.now_ns += TURN_NS + 1
    case.add(Work(), at_any_time=False)
    assert case.states() == ["done"] * 8 + ["unknown", "begun"]
    assert works[-1].num_asked == 1


def test_works_whose_caller_waits_are_let_go_when_their_thread_starts_another(case: Case) -> None:
    """Finished with outcome; without polling if the outcome is unknown; not by the start of a different thread."""
    done, failed, mute, others = Work(), Work(RuntimeError("connection closed")), Work(), Work()
    done.is_over = failed.is_over = True
    for work in (done, failed):
        case.add(work, is_waited_for=True)
    case.add(mute, is_waited_for=True, at_any_time=False, reports_failure=False)
    case.add(others, is_waited_for=True, at_any_time=False, reports_failure=False, thread=4712)
    case.now_ns += 1
    case.add(Work(), is_waited_for=True, thread=4712)
    case.add(Work(), thread=4712)
    assert case.states() == ["done", "failed", "begun", "done", "begun", "begun"]
    assert [work.num_asked for work in (done, failed, mute, others)] == [1, 1, 0, 0]


def test_work_whose_caller_waits_is_asked_like_others_when_nothing_else_starts(case: Case) -> None:
    """Its end is seen at the next poll, and it is not polled again by the next collective."""
    work, late = Work(), Work()
    work.is_over = True
    case.add(work, is_waited_for=True)
    case.pending.catch_up()
    assert case.states() == ["done"]
    case.add(late, is_waited_for=True)
    case.add(Work())
    assert case.states() == ["done", "begun", "begun"]
    assert [work.num_asked, late.num_asked] == [1, 1]


def test_a_failure_is_seen_by_a_wait_where_that_is_safe(case: Case) -> None:
    """A wait for a finished work takes less than its future, which is not asked for then."""
    work = Work(RuntimeError("connection closed"))
    work.is_over = True
    work.get_future = None  # type: ignore[method-assign, assignment]
    case.add(work, may_be_waited_for=True)
    case.pending.catch_up()
    assert case.states() == ["failed"]


def test_works_without_a_future_are_not_asked_for_one(case: Case) -> None:
    """For point-to-point works and NCCL's, only the end is known."""
    work = Work(RuntimeError("nobody asks for it"))
    work.is_over = True
    case.add(work, reports_failure=False)
    case.pending.catch_up()
    assert case.states() == ["done"]


def test_works_are_let_go_when_the_recording_ends(case: Case) -> None:
    """Nothing is polled afterwards."""
    work = Work()
    case.add(work)
    case.pending.clear()
    case.pending.catch_up()
    assert work.num_asked == 0


def test_reduce_ops_are_read_of_all_but_where_there_are_many(case: Case) -> None:
    """Every 17th of more than 256 in one interval; all again after an interval with few."""

    class ReduceOp:
        def op(self) -> int:
            return 3

    def known_after(num_added: int) -> list[int]:
        before = len(case.states())
        for _ in range(num_added):
            case.add(Work(), reduce_op=ReduceOp())
        case.pending.catch_up()
        return [entry.index for entry in read_ring(case.path).collectives[before:] if entry.reduce_op == "MIN"]

    assert len(known_after(256)) == 256
    assert known_after(300) == [*range(257, 514), *range(527, 557, REDUCE_OP_STEP)]
    assert len(known_after(100)) == 6
    assert len(known_after(100)) == 100


def test_the_reduce_op_of_the_reducer_is_read_once(case: Case) -> None:
    """Its collectives that are alike have the same one; those of the program are read each time."""
    num_read = []

    class ReduceOp:
        def op(self) -> int:
            num_read.append(1)
            return 3

    for is_by_reducer in (True, False):
        usual = case.template(is_by_reducer=is_by_reducer)
        for _ in range(3):
            case.pending.add((begin(case.ring, 100), usual, 4711, ReduceOp()), Work())
            case.pending.catch_up()
        assert len(num_read) == (1 if is_by_reducer else 4)
    assert [entry.reduce_op for entry in read_ring(case.path).collectives] == ["MIN"] * 6


def test_work_that_cannot_be_asked_does_not_keep_others_from_being_asked(case: Case) -> None:
    """Its error is raised once; its end is unknown, and works after it are polled next time."""
    broken, other = Work(), Work()
    broken.is_completed = None  # type: ignore[assignment, method-assign]
    other.is_over = True
    case.add(broken)
    case.add(other)
    with pytest.raises(TypeError):
        case.pending.catch_up()
    case.pending.catch_up()
    assert case.states() == ["unknown", "done"]


def test_a_synchronous_collective_of_an_accelerator_is_over_when_its_stream_has_passed_it(case: Case) -> None:
    """NCCL returns no work since torch 2.8: threads that start more collectives poll a mark on the stream instead."""
    for _ in range(2):
        case.add(None, at_any_time=False, reports_failure=False, runs_on_stream=True)
    assert len(case.marks) == 2
    case.marks[0].is_reached = True
    case.pending.catch_up()
    assert case.states() == ["begun", "begun"]
    case.now_ns += 2 * TURN_NS
    case.add(Work(), at_any_time=False)
    assert case.states() == ["done", "begun", "begun"]


def test_calls_without_a_work_that_are_not_started_yet_are_unknown(case: Case) -> None:
    """Coalesced calls and messages: a mark on the stream would be reached before they run."""
    case.add(None, at_any_time=False)
    case.coalescing = True
    case.add(None, at_any_time=False, runs_on_stream=True)
    case.coalescing, case.capturing = False, True
    case.add(None, at_any_time=False, runs_on_stream=True)
    assert case.states() == ["unknown"] * 3
    assert case.marks == []
