# SPDX-License-Identifier: Apache-2.0
"""Read a ring, and refuse files that are not readable rings."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpilot.errors import RecordError
from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.reader import count_begun_in, find_waiting, read_newest, read_ring
from tests.unit.record.rings import begin, open_ring


def test_read_ring_gives_only_what_was_asked_for(tmp_path: Path) -> None:
    """Records after an index, or the newest ones, also after the ring has wrapped around."""
    ring = open_ring(tmp_path / "ring", num_records=16)
    for start_ns in range(1, 31):
        begin(ring, start_ns)
    indices = [
        [entry.index for entry in read_ring(tmp_path / "ring", after=after, newest=newest).collectives]
        for after, newest in ((0, None), (28, None), (30, None), (0, 3), (29, 3), (0, 0), (0, 100))
    ]
    ring.close(1)
    assert indices == [list(range(15, 31)), [29, 30], [], [28, 29, 30], [30], [], list(range(15, 31))]


Change = Callable[[bytearray], bytearray | bytes]


def put(at: int, value: int) -> Change:
    """A change of a number in the header."""

    def change(data: bytearray) -> bytearray:
        struct.pack_into("=I", data, at, value)
        return data

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "foreign": (lambda data: b"#!/usr/bin/env python\n" * 500, "is not a flight ring"),
    "empty": (lambda data: b"", "0 bytes that start with b''"),
    "unpublished": (lambda data: bytes(8) + data[8:], "is not a flight ring"),
    "later": (put(8, 99), "a flight ring of version 99; this ddpilot reads version 1"),
    "byte order": (put(12, 0x04030201), "a ring of a machine with a different byte order"),
    "record size": (put(20, 64), "a damaged header"),
    "about": (lambda data: data.replace(b"node7", b"node8"), "a damaged header"),
    "cut off": (lambda data: data[:-1], "The file is truncated"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_read_ring_refuses_what_it_cannot_read(tmp_path: Path, kind: str) -> None:
    """Files of other programs, rings of other versions and machines, and damaged ones are refused with the reason."""
    path = tmp_path / "ring"
    open_ring(path).close(1)
    change, expected = REFUSED[kind]
    path.write_bytes(change(bytearray(path.read_bytes())))
    with pytest.raises(RecordError) as refused:
        read_ring(path)
    assert expected in str(refused.value)
    assert str(path) in str(refused.value)


def test_read_ring_says_that_there_is_none(tmp_path: Path) -> None:
    """Before a rank starts to record there is no file, and `FileNotFoundError` is raised."""
    with pytest.raises(FileNotFoundError):
        read_ring(tmp_path / "ring")


def test_find_waiting_returns_the_newest_unfinished_collective(tmp_path: Path) -> None:
    """One whose end cannot be seen does not count; `count_begun_in` counts those of its group."""
    ring = open_ring(tmp_path / "ring", num_records=8)
    log = read_newest(tmp_path / "ring")
    assert (find_waiting(log), count_begun_in(log, "0")) == (None, None)
    first, second, third, _ = (begin(ring, 10 * seq, seq=seq) for seq in range(4))
    ring.finish(first, 11, layout.DONE)
    ring.finish(third, 0, layout.UNKNOWN)
    log = read_newest(tmp_path / "ring")
    waiting = find_waiting(log)
    assert waiting is not None
    assert (waiting.seq, waiting.start_ns, log.num_begun, count_begun_in(log, "0")) == (3, 30, 4, 4)
    ring.finish(second, 40, layout.DONE)
    ring.finish(4, 40, layout.FAILED)
    assert find_waiting(read_newest(tmp_path / "ring")) is None
    ring.close(50)
    assert read_newest(tmp_path / "ring").closed_ns == 50


def test_read_newest_looks_only_at_the_newest_records(tmp_path: Path) -> None:
    """An old collective that was not seen to finish is not the current one; its cost does not grow."""
    ring = open_ring(tmp_path / "ring", num_records=512)
    begin(ring, 1)
    for seq in range(1, 200):
        ring.finish(begin(ring, 1 + seq, seq=seq), 2 + seq, layout.DONE)
    log = read_newest(tmp_path / "ring")
    ring.close(1)
    assert (find_waiting(log), count_begun_in(log, "0")) == (None, 200)


def test_layout_is_the_one_that_the_documentation_describes() -> None:
    """The page names this version, and the offsets of the words after a record's body."""
    page = (Path(__file__).parents[4] / "docs" / "internals" / "flight-ring.md").read_text()
    assert f"## Layout, version {layout.VERSION}" in page
    places = (layout.BODY.size, *(8 * word for word in (layout.REDUCE_OP, layout.PENDING_NS, layout.OUTCOME)))
    assert all(f"\n| {place} | " in page for place in places)


@pytest.mark.parametrize("later", [{"incarnation": 2}, {"attempt": 1}], ids=["program", "session"])
def test_find_waiting_waits_for_nothing_of_groups_that_a_rebuild_has_destroyed(
    tmp_path: Path, later: dict[str, Any]
) -> None:
    """Unfinished collectives of a destroyed default group, or of a group created in it, do not count as waits."""
    ring = open_ring(tmp_path / "ring", num_records=8)
    begin(ring, 10, name="1")
    begin(ring, 20)
    ring.finish(begin(ring, 30, **later), 31, layout.DONE)
    assert find_waiting(read_newest(tmp_path / "ring")) is None
    begin(ring, 40, name="1", **later)
    waiting = find_waiting(read_newest(tmp_path / "ring"))
    ring.close(50)
    assert waiting is not None
    assert waiting.start_ns == 40
