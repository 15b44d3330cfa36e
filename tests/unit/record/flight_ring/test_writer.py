# SPDX-License-Identifier: Apache-2.0
"""The ring can be read at every moment while it is written, and after it wraps around."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.log import CallSite, GroupOfRanks, Tensor
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.flight_ring.writer import RingWriter
from tests.unit.record.rings import begin, open_ring


def test_ring_gives_back_what_was_written(tmp_path: Path) -> None:
    """The writer, and each collective with op, group, number, tensors, line, times, thread and reduce-op."""
    ring = open_ring(tmp_path / "ring")
    index = begin(ring, 100, seq=7, flags=layout.NOT_ASYNC | layout.ASKED_ANY_TIME)
    ring.set_reduce_op(index, 4)
    ring.still_pending(index, 150)
    ring.finish(index, 200, layout.DONE)
    ring.beat(210)
    log = read_ring(tmp_path / "ring")
    ring.close(220)
    assert (log.rank, log.pid, log.host, log.num_begun) == (3, 4711, "node7", 1)
    assert (log.heartbeat_ns, log.closed_ns, log.num_torn, log.num_faults) == (210, None, 0, 0)
    entry = log.collectives[0]
    assert (entry.op, entry.operator, entry.seq, entry.thread) == ("all_reduce", "c10d::allreduce_", 7, 4711)
    assert entry.group == GroupOfRanks(
        name="0", incarnation=1, description="default_pg", size=2, rank=1, ranks=(0, 1), backend=""
    )
    assert entry.inputs == (Tensor(dtype="float32", shape=(2,), device="cpu"),)
    assert (entry.num_bytes, entry.reduce_op, entry.is_async, entry.is_watched) == (8, "MAX", False, True)
    assert (entry.root, entry.peer, entry.tag, entry.ddp) == (None, None, None, None)
    assert (entry.start_ns, entry.pending_ns, entry.end_ns, entry.state) == (100, 150, 200, "done")
    assert entry.line == CallSite(
        file="train.py", line=88, function="step", text="loss.backward()", via="Tensor.backward"
    )
    assert entry.line.place == "train.py:88"
    assert read_ring(tmp_path / "ring").closed_ns == 220


@settings(max_examples=30, deadline=None)
@given(num_records=st.integers(1, 9), shapes=st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_ring_keeps_the_newest_records_when_it_has_gone_round(
    tmp_path_factory: Any, num_records: int, shapes: list[int]
) -> None:
    """The newest records are complete with their facts, however many are written and pages are reused."""
    path = tmp_path_factory.mktemp("ring") / "ring"
    ring = open_ring(path, num_records=num_records)
    for seq, shape in enumerate(shapes):
        index = begin(ring, 100 + seq, seq=seq, shape=(shape,))
        if shape % 2:
            ring.finish(index, 1000 + seq, layout.FAILED)
    log = read_ring(path)
    ring.close(1)
    newest = list(enumerate(shapes))[-num_records:]
    assert [(entry.seq, entry.inputs[0].shape[0]) for entry in log.collectives] == newest
    assert [entry.state == "failed" for entry in log.collectives] == [bool(shape % 2) for _, shape in newest]
    assert [entry.end_ns is not None for entry in log.collectives] == [bool(shape % 2) for _, shape in newest]
    assert (log.num_begun, log.num_torn) == (len(shapes), 0)


def test_ring_ignores_news_of_a_record_that_was_overwritten(tmp_path: Path) -> None:
    """A late result of an overwritten record does not change the record in its place."""
    ring = open_ring(tmp_path / "ring", num_records=2)
    old = begin(ring, 100)
    for start_ns in (200, 300):
        begin(ring, start_ns)
    ring.still_pending(old, 400)
    ring.set_reduce_op(old, 3)
    ring.finish(old, 500, layout.DONE)
    entries = read_ring(tmp_path / "ring").collectives
    ring.close(1)
    assert [(entry.start_ns, entry.state, entry.pending_ns, entry.reduce_op) for entry in entries] == [
        (200, "begun", None, None),
        (300, "begun", None, None),
    ]


def test_record_that_was_cut_short_is_found_by_its_start(tmp_path: Path) -> None:
    """Only the newest record is finished, and only if thread and start time match."""
    ring = open_ring(tmp_path / "ring")
    begin(ring, 100)
    begin(ring, 200)
    ring.finish_started_at(100, 4711, layout.UNKNOWN)
    ring.finish_started_at(200, 4712, layout.UNKNOWN)
    assert [entry.state for entry in read_ring(tmp_path / "ring").collectives] == ["begun", "begun"]
    ring.finish_started_at(200, 4711, layout.UNKNOWN)
    states = [entry.state for entry in read_ring(tmp_path / "ring").collectives]
    ring.close(1)
    assert states == ["begun", "unknown"]


def test_fact_that_is_too_large_is_left_out(tmp_path: Path) -> None:
    """A fact larger than a page is lost, its record is not."""
    ring = open_ring(tmp_path / "ring")
    assert ring.write_fact({"text": "x" * 5000}) == 0
    assert ring.write_fact({"text": "short"}) != 0
    ring.note_fault("first")
    ring.note_fault("second")
    begin(ring, 1)
    log = read_ring(tmp_path / "ring")
    ring.close(1)
    assert (log.num_faults, log.first_fault) == (2, "first")
    assert len(log.collectives) == 1


def trace_every_instruction(look: Callable[[], None]) -> Callable[[FrameType, str, Any], Any]:
    """A tracing function that calls `look` before every bytecode instruction of the ring's methods."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != RingWriter.begin.__code__.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            look()
        return trace

    return trace


def test_ring_can_be_read_whichever_instruction_the_writer_was_killed_at(tmp_path: Path) -> None:
    """At every bytecode instruction, also while the ring wraps around, each record is complete or absent."""
    path = tmp_path / "ring"
    ring = open_ring(path, num_records=2)
    seen = []

    def look() -> None:
        log = read_ring(path)
        assert (log.num_torn, log.num_faults) == (0, 0)
        for entry in log.collectives:
            assert entry.inputs[0].shape == (entry.start_ns,)
            assert (entry.op, entry.line and entry.line.line, entry.num_bytes) == (
                "all_reduce", 88, 4 * entry.start_ns,
            )  # fmt: skip
            assert entry.end_ns in (None, entry.start_ns + 1)
            assert entry.state in ("begun", "done")
        seen.append(tuple((entry.index, entry.state) for entry in log.collectives))

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 makes no such events
    sys.settrace(trace_every_instruction(look))
    try:
        for number in range(1, 4):
            index = begin(ring, number, shape=(number,))
            ring.still_pending(index, number)
            ring.finish(index, number + 1, layout.DONE)
    finally:
        sys.settrace(before)
    ring.close(1)
    assert len(seen) > 300
    expected = [(), ((1, "begun"),), ((1, "done"),), ((1, "done"), (2, "begun")), ((1, "done"), (2, "done"))]
    expected += [((2, "done"), (3, "begun")), ((2, "done"), (3, "done"))]
    assert list(dict.fromkeys(seen)) == expected


def test_record_that_is_torn_is_counted_and_left_out(tmp_path: Path) -> None:
    """A record with a wrong checksum, as after a crash of the machine, is not returned."""
    path = tmp_path / "ring"
    ring = open_ring(path)
    for start_ns in (100, 200):
        begin(ring, start_ns)
    ring.close(1)
    data = bytearray(path.read_bytes())
    data[layout.HEADER_BYTES + layout.RECORD_BYTES + 9] ^= 0xFF
    path.write_bytes(data)
    log = read_ring(path)
    assert [entry.start_ns for entry in log.collectives] == [200]
    assert log.num_torn == 1
