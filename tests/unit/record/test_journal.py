# SPDX-License-Identifier: Apache-2.0
"""Write guard's journal and read it back."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpilot.errors import RecordError
from ddpilot.record.journal import NUM_STEPS, Journal, JournalWriter, read_journal


def test_journal_reads_what_was_written_in_order_and_only_what_is_new(tmp_path: Path) -> None:
    """Entries come back with kind, values, index and rising times; `after` leaves out those that are known."""
    writer = JournalWriter(tmp_path / "rank3.journal", rank=3)
    for number in range(5):
        writer.write("step", {"number": number, "nan": float("inf"), "text": "ä\n"})
    journal = read_journal(tmp_path / "rank3.journal")
    assert (journal.rank, journal.pid, journal.num_lost, journal.closed_ns) == (3, os.getpid(), 0, None)
    assert [(entry.index, entry.kind, entry.values["number"]) for entry in journal.entries] == [
        (number + 1, "step", number) for number in range(5)
    ]
    assert sorted(entry.time_ns for entry in journal.entries) == [entry.time_ns for entry in journal.entries]
    assert [entry.index for entry in read_journal(tmp_path / "rank3.journal", after=3).entries] == [4, 5]
    writer.close()
    writer.close()
    writer.write("late", {})
    closed = read_journal(tmp_path / "rank3.journal")
    assert closed.closed_ns is not None
    assert len(closed.entries) == 5


def test_journal_stays_as_large_as_it_is_and_counts_what_it_lost(tmp_path: Path) -> None:
    """After many entries at least the newest page is kept, the rest is counted, and the file has not grown."""
    path = tmp_path / "journal"
    writer = JournalWriter(path, rank=0, page_bytes=4096)
    size = path.stat().st_size
    seen: list[int] = []
    for number in range(1, 5001):
        writer.write("step", {"number": number})
        if number % 40 == 0:
            journal = read_journal(path, after=seen[-1] if seen else 0)
            assert journal.num_lost == 0
            seen += [entry.index for entry in journal.entries]
    assert seen == list(range(1, 5001))
    for after in (4990, 4999, 5000):
        assert [entry.index for entry in read_journal(path, after=after).entries] == list(range(after + 1, 5001))
    whole = read_journal(path)
    held = [entry.index for entry in whole.entries]
    assert held == list(range(held[0], 5001))
    assert whole.num_lost == 5000 - len(held)
    assert len(held) > 60
    assert path.stat().st_size == size


def test_journal_gives_ordinary_steps_among_other_entries(tmp_path: Path) -> None:
    """In the order in which they were written, also with many events, and with a group that does not count."""
    path = tmp_path / "journal"
    writer = JournalWriter(path, rank=0)
    writer.write("parameter_set", {"parameter_set": 1})
    writer.write_step(1, 7, 1 << 40, "FB")
    writer.write("step", {"parameter_set": 1, "step": 8, "fingerprint": {}})
    writer.write_step(2, 9, -1, "")
    writer.write_step(2, 10, 5, "FBFBFBFBFB")
    journal = read_journal(path)
    assert [(entry.index, entry.kind, entry.values) for entry in journal.entries] == [
        (1, "parameter_set", {"parameter_set": 1}),
        (2, "step", {"parameter_set": 1, "step": 7, "seq": 1 << 40, "events": "FB"}),
        (3, "step", {"parameter_set": 1, "step": 8, "fingerprint": {}}),
        (4, "step", {"parameter_set": 2, "step": 9, "seq": -1, "events": ""}),
        (5, "step", {"parameter_set": 2, "step": 10, "seq": 5, "events": "FBFBFBFBFB"}),
    ]
    assert sorted(entry.time_ns for entry in journal.entries) == [entry.time_ns for entry in journal.entries]
    assert [entry.index for entry in read_journal(path, after=3).entries] == [4, 5]
    writer.close()
    writer.write_step(2, 11, 6, "FB")
    assert read_journal(path, after=5).entries == ()


def test_journal_holds_the_newest_ordinary_steps_and_counts_the_others(tmp_path: Path) -> None:
    """Overwritten steps are lost, other entries are not."""
    path = tmp_path / "journal"
    writer = JournalWriter(path, rank=0)
    writer.write("first", {})
    size = path.stat().st_size
    for number in range(NUM_STEPS + 10):
        writer.write_step(1, number, number, "FB")
    journal = read_journal(path)
    assert [entry.index for entry in journal.entries] == [1, *range(12, NUM_STEPS + 12)]
    assert journal.entries[-1].values["step"] == NUM_STEPS + 9
    assert journal.num_lost == 10
    assert path.stat().st_size == size


def test_journal_leaves_out_a_step_that_is_just_being_written_over(tmp_path: Path) -> None:
    """It is counted as lost; entries around it are read."""
    path = tmp_path / "journal"
    writer = JournalWriter(path, rank=0)
    for number in range(3):
        writer.write_step(1, number, 1000 + number, "FB")
    data = bytearray(path.read_bytes())
    at = data.index((1001).to_bytes(8, sys.byteorder))
    data[at + 16] ^= 0xFF  # its index, written last
    (tmp_path / "torn").write_bytes(data)
    journal = read_journal(tmp_path / "torn")
    assert [entry.index for entry in journal.entries] == [1, 3]
    assert journal.num_lost == 1


def test_journal_counts_an_entry_that_no_page_can_hold(tmp_path: Path) -> None:
    """It is lost and counted in `num_lost`; later entries are not."""
    writer = JournalWriter(tmp_path / "journal", rank=0, page_bytes=4096)
    writer.write("large", {"text": "x" * 5000})
    writer.write("small", {})
    journal = read_journal(tmp_path / "journal")
    assert [(entry.index, entry.kind) for entry in journal.entries] == [(2, "small")]
    assert journal.num_lost == 1
    with pytest.raises(TypeError):
        writer.write("no JSON", {"value": object()})
    assert read_journal(tmp_path / "journal", after=2) == Journal(0, os.getpid(), (), 0, None)


def test_journal_goes_on_behind_an_entry_that_was_cut_short(tmp_path: Path) -> None:
    """A damaged entry is skipped and counted; those after it are read."""
    path = tmp_path / "journal"
    writer = JournalWriter(path, rank=0)
    for number in range(3):
        writer.write("step", {"number": number})
    data = bytearray(path.read_bytes())
    at = data.index(b'{"number":1}')
    data[at : at + 4] = b"\0\0\0\0"
    (tmp_path / "damaged").write_bytes(data)
    journal = read_journal(tmp_path / "damaged")
    assert [entry.index for entry in journal.entries] == [1, 3]
    assert journal.num_lost == 1


def test_journal_outlives_a_kill_and_is_not_written_by_a_fork(tmp_path: Path) -> None:
    """Notes before SIGKILL are in the journal; those of a forked copy are not."""
    code = (
        "import os, signal, sys; from ddpilot.record.journal import JournalWriter\n"
        "writer = JournalWriter(sys.argv[1], rank=1); writer.write('mine', {})\n"
        "pid = os.fork()\n"
        "if not pid: writer.write('fork', {}); writer.write_step(1, 1, 1, 'FB'); writer.close(); os._exit(0)\n"
        "os.waitpid(pid, 0); writer.write('mine', {}); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "journal")], check=False, timeout=20)
    assert done.returncode == -signal.SIGKILL
    journal = read_journal(tmp_path / "journal")
    assert [(entry.index, entry.kind) for entry in journal.entries] == [(1, "mine"), (2, "mine")]
    assert journal.closed_ns is None


def test_journal_refuses_what_is_none(tmp_path: Path) -> None:
    """A wrong file, a different version and a missing file raise different errors."""
    path = tmp_path / "journal"
    JournalWriter(path, rank=0)
    data = bytearray(path.read_bytes())
    data[8] = 9
    (tmp_path / "other").write_bytes(data)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(RecordError, match="version 9"):
        read_journal(tmp_path / "other")
    with pytest.raises(RecordError, match="which is not a journal"):
        read_journal(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        read_journal(tmp_path / "missing")


def test_journal_says_when_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is allocated on creation: OSError then, and no file remains."""

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space"):
        JournalWriter(tmp_path / "journal", rank=0)
    assert list(tmp_path.iterdir()) == []
