# SPDX-License-Identifier: Apache-2.0
"""When a host process ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.hook import journal_path, ring_path
from ddpilot.record.journal import JournalWriter, read_journal
from ddpilot.session.host.host import FileWatch, Host, WatchedFile
from ddpilot.session.nodes.messages import FileBlocks
from ddpilot.session.nodes.node_ranks import _with_clock
from tests.unit.record.rings import begin, open_ring


@pytest.mark.parametrize(
    ("lost", "can_start", "is_over"), [("", True, False), ("closed its connection", True, True), ("", False, True)]
)
def test_tick_ends_the_host_without_a_parent_or_a_rank_server(lost: str, can_start: bool, is_over: bool) -> None:
    """A node that can start no ranks counts as lost, so that a restart starts its host again."""
    stopped: list[bool] = []
    host: Any = Host.__new__(Host)
    host._link = SimpleNamespace(lost=lost)
    host._ranks = SimpleNamespace(can_start=can_start)
    host._placement = SimpleNamespace(ranks=())
    host._files = SimpleNamespace(look=lambda ranks: None)
    host._loop = SimpleNamespace(stop=lambda: stopped.append(True))
    host._tick()
    assert bool(stopped) == is_over


def test_only_changed_blocks_are_sent_and_make_the_same_file(tmp_path: Path) -> None:
    """A replaced file is announced as new."""
    sent: list[FileBlocks] = []
    watch = FileWatch(tmp_path, sent.append)
    watch.look([0])
    assert sent == []
    path = ring_path(tmp_path, 0)
    content = bytearray(bytes(200_000))
    content[100_000] = 1
    path.write_bytes(content)
    watch.look([0])
    (first,) = sent
    assert (first.name, first.size, first.is_new) == ("rank0.ring", 200_000, True)
    assert list(first.blocks) == [100_000 // 4096 * 4096]
    watch.look([0])
    assert len(sent) == 1
    with path.open("r+b") as file:
        file.seek(150_000)
        file.write(b"z")
    watch.look([0], is_end=True)
    assert list(sent[1].blocks) == [150_000 // 4096 * 4096]
    assert not sent[1].is_new
    other = tmp_path / "other"
    other.write_bytes(b"y" * 5000)
    other.replace(path)
    watch.look([0])
    assert (sent[2].is_new, sent[2].size, sorted(sent[2].blocks)) == (True, 5000, [0, 4096])


def test_a_file_is_compared_less_often_while_its_header_does_not_change(tmp_path: Path) -> None:
    """At once after a change of it and at the end of the cell, then at growing distances up to a second."""
    path = tmp_path / "rank0.ring"
    ring = open_ring(path)
    file = WatchedFile(path)
    assert file.is_due(100.0, is_end=False)
    due_s = [tenths / 10 for tenths in range(1000, 1060) if file.is_due(tenths / 10, is_end=False)]
    assert due_s == pytest.approx([100.1, 100.3, 100.7, 101.5, 102.5, 103.5, 104.5, 105.5])
    begin(ring, 1_000)
    assert [file.is_due(106.0, is_end=False) for _ in range(2)] == [True, False]
    assert [file.is_due(106.0, is_end=True) for _ in range(2)] == [True, False]
    begin(ring, 2_000)
    assert [file.is_due(106.0, is_end=True) for _ in range(2)] == [True, False]
    file.close()


def test_an_entry_of_a_journal_is_passed_on_at_once(tmp_path: Path) -> None:
    """It changes the header."""
    sent: list[FileBlocks] = []
    watch = FileWatch(tmp_path, sent.append)
    journal = JournalWriter(journal_path(tmp_path, 0), rank=0)
    watch.look([0])
    watch.look([0])
    assert len(sent) == 1
    journal.write("note", {"a": 1})
    watch.look([0])
    assert len(sent) == 2
    journal.close()


def test_times_in_a_copy_are_on_the_readers_clock(tmp_path: Path) -> None:
    """The word in its header says what the other machine's clock is ahead, or with a minus behind."""
    own, copy = tmp_path / "own.ring", tmp_path / "copy.ring"
    begin(open_ring(own), 1_000)
    copy.write_bytes(_with_clock("copy.ring", own.read_bytes(), -5e-9))
    here, there = read_ring(own), read_ring(copy)
    assert there.collectives[0].start_ns == here.collectives[0].start_ns + 5
    assert there.started_ns == here.started_ns + 5
    assert there.closed_ns is None

    journal = JournalWriter(tmp_path / "own.journal", rank=0)
    journal.write("note", {"a": 1})
    data = (tmp_path / "own.journal").read_bytes()
    (tmp_path / "copy.journal").write_bytes(_with_clock("copy.journal", data, 3e-9))
    (entry,), (copied,) = (read_journal(tmp_path / f"{name}.journal").entries for name in ("own", "copy"))
    assert copied.time_ns == entry.time_ns - 3
    journal.close()
