# SPDX-License-Identifier: Apache-2.0
"""Rings that grow: read again where something may have come, compared as they grow, in memory that stays as it is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpilot.errors import RecordError
from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.flight_ring.writer import RingWriter
from ddpilot.record.hook import journal_path, ring_path
from ddpilot.record.journal import Entry, JournalWriter, read_journal
from ddpilot.watch.analysis import analyze
from ddpilot.watch.snapshot import files, reader
from ddpilot.watch.snapshot.files import JournalFollower
from ddpilot.watch.snapshot.reader import SnapshotReader
from tests.unit.record.rings import ABOUT, begin, open_ring

S = 10**9
PER_LOOK = 500
NUM_PARTS, LOOKS_EACH = (8, 3600 * 4) if os.environ.get("DDPILOT_SOAK") else (2, 40)
LINE = {"file": "train.py", "line": 88, "function": "step", "text": "loss.backward()", "via": "Tensor.backward"}
SUM, MAX = (layout.REDUCE_OPS.index(name) for name in ("SUM", "MAX"))


class Clock:
    """Takes the place of `time` where rings are read."""

    now_ns = 1000 * S

    def monotonic_ns(self) -> int:
        """The time of the test."""
        return self.now_ns


class Job:
    """Two ranks, each of which writes its ring, and what looks at them."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.clock = clock
        self.folder = folder
        self.num_done = 0
        self._rings = [self._open(rank) for rank in (0, 1)]
        self._reader = SnapshotReader(folder, 2, (0, 1), "job")

    def _open(self, rank: int) -> tuple[RingWriter, bytes]:
        ring = open_ring(ring_path(self.folder, rank), num_records=8192, page_bytes=4096, publish=False)
        ring.publish({**ABOUT, "rank": rank, "pid": os.getpid(), "started_ns": 1})
        group = {"name": "0", "incarnation": 1, "size": 2, "rank": rank, "ranks": "0-1"}
        tensors = {"inputs": [["float32", [4], "cpu"]], "num_inputs": 1}
        facts = ({"op": "all_reduce", "operator": "c10d::allreduce_"}, group, LINE, tensors)
        refs = [ring.write_fact(fact) for fact in facts]
        return ring, layout.USUAL.pack(*refs, *[layout.NO_NUMBER] * 3, layout.ASKED_ANY_TIME, 16)

    def run(self, num: int, *, reduce_ops: tuple[int | None, int | None] = (SUM, SUM)) -> None:
        """Both do `num` all_reduces in a quarter of a second."""
        begun_ns = self.clock.now_ns
        for rank, (ring, usual) in enumerate(self._rings):
            for number in range(num):
                start_ns = begun_ns + number * S // 4 // num
                index = ring.begin(start_ns, self.num_done + number, 4711, 0, usual)
                if (reduce_op := reduce_ops[rank]) is not None:
                    ring.set_reduce_op(index, reduce_op)
                ring.finish(index, start_ns + 1000, layout.DONE)
        self.num_done += num
        self.clock.now_ns += S // 4

    def set_last_reduce_op(self, rank: int, reduce_op: int) -> None:
        """What comes up to 50 ms after the record."""
        self._rings[rank][0].set_reduce_op(self.num_done, reduce_op)

    def close(self) -> None:
        """Both have ended."""
        for ring, _ in self._rings:
            ring.close(self.clock.now_ns)

    def look(self) -> list[str]:
        """The codes of what is found."""
        self._seen = self._reader.read({})
        return [finding.code for finding in analyze(self._seen).findings]

    def complaints(self) -> list[str]:
        """What is said of files that cannot be read."""
        return self._reader.complaints()

    @property
    def num_held(self) -> int:
        """Collectives in memory."""
        return sum(len(rank.collectives) for rank in self._seen.ranks.values())


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """One whose clock the test has."""
    clock = Clock()
    monkeypatch.setattr(files, "time", clock)
    monkeypatch.setattr(reader, "time", clock)
    job = Job(tmp_path, clock)
    yield job
    job.close()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each reading has decoded."""
    counts: list[int] = []

    def read_and_count(*args: Any, **kwargs: Any) -> Any:
        log = read_ring(*args, **kwargs)
        counts.append(len(log.collectives))
        return log

    monkeypatch.setattr(files, "read_ring", read_and_count)
    return counts


def test_a_record_that_is_complete_is_read_once(job: Job, decoded: list[int]) -> None:
    """Decoding is what a look costs most."""
    for _ in range(3):
        job.run(40)
        assert job.look() == []
    assert decoded == [40] * 6


def test_a_reduce_op_that_comes_late_is_read_later(job: Job, decoded: list[int]) -> None:
    """One that differs is found then; one that never comes is waited for no longer than it may take."""
    job.run(3, reduce_ops=(SUM, None))
    assert job.look() == []
    job.set_last_reduce_op(1, MAX)
    assert job.look() == ["DDP204"]
    for _ in range(2):
        job.clock.now_ns += S // 4
        job.look()
    assert decoded[-1] == 0


@pytest.mark.parametrize("reduce_ops", [(SUM, MAX), (MAX, SUM)])
def test_a_difference_between_two_looks_is_found_in_the_next(job: Job, reduce_ops: tuple[int, int]) -> None:
    """Also where both ranks have gone on since then, as they do after a silent one."""
    job.run(200)
    assert job.look() == []
    job.run(1, reduce_ops=reduce_ops)
    job.run(200)
    assert job.look() == ["DDP204"]


@pytest.mark.soak
@pytest.mark.timeout(20_000)
def test_memory_stays_flat_through_hours_of_collectives(job: Job) -> None:
    """8 hours at 2,000 collectives per second of each of two ranks; half a minute of it in every run."""
    for _ in range(40):
        job.run(PER_LOOK)
        assert job.look() == []
    early_bytes, early_held = psutil.Process().memory_info().rss, job.num_held
    num_ring_bytes = [path.stat().st_size for path in job.folder.glob("*.ring")]
    for _ in range(NUM_PARTS):
        for _ in range(LOOKS_EACH):
            job.run(PER_LOOK)
            assert job.look() == []
        assert job.num_held <= early_held + 2 * PER_LOOK
        assert psutil.Process().memory_info().rss - early_bytes < 4 << 20
    assert [path.stat().st_size for path in job.folder.glob("*.ring")] == num_ring_bytes


def cut_off(path: Path) -> None:
    """Half of its last page stays."""
    os.truncate(path, 3 * path.stat().st_size // 4 - 100)


def overwrite(path: Path) -> None:
    """All of it."""
    noise = random.Random(0).randbytes(path.stat().st_size)
    with path.open("r+b") as file:
        file.write(noise)


def overwrite_records(path: Path) -> None:
    """The header stays as it was."""
    with path.open("r+b") as file:
        file.seek(layout.HEADER_BYTES)
        file.write(random.Random(0).randbytes(8192 * layout.RECORD_BYTES))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "the file is gone, deleted or moved away"),
    "cut off": (cut_off, "bytes of a flight ring of"),
    "noise": (overwrite, "which is not a flight ring"),
    "noise in records": (overwrite_records, "records are damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_ring_that_is_damaged_from_outside_is_said_once_and_is_no_finding(job: Job, damage: str) -> None:
    """The other rank is read on."""
    job.run(20)
    assert job.look() == []
    assert job.complaints() == []
    change, said = DAMAGES[damage]
    change(ring_path(job.folder, 1))
    assert job.look() == []
    (complaint,) = job.complaints()
    assert complaint.startswith(f"the recording of rank 1 in {job.folder} cannot be read: ")
    assert said in complaint
    job.clock.now_ns += 10 * S
    assert job.look() == []
    assert job.complaints() == []
    assert job.num_held >= 20


def read_entries(reader: SnapshotReader) -> dict[int, tuple[Entry, ...]]:
    """Return what guard has noted since the last call."""
    reader.read_journals()
    return reader.take_entries()


def test_a_journal_that_is_damaged_is_said_once(tmp_path: Path) -> None:
    """Before there is one, nothing is to be said."""
    reader = SnapshotReader(tmp_path, 1, (0,), "job")
    assert (read_entries(reader), reader.complaints()) == ({}, [])
    writer = JournalWriter(journal_path(tmp_path, 0), rank=0)
    writer.write("step", {})
    assert len(read_entries(reader)[0]) == 1
    journal_path(tmp_path, 0).unlink()
    complaints = [(read_entries(reader), reader.complaints())[1] for _ in range(2)]
    assert [len(each) for each in complaints] == [1, 0]
    assert complaints[0][0].startswith(f"the notes of guard of rank 0 in {tmp_path} cannot be read: the file")
    writer.close()


@pytest.mark.parametrize("seed", range(30))
def test_noise_anywhere_in_a_file_never_raises_anything_else(tmp_path: Path, seed: int) -> None:
    """Of rings and journals, whatever of it is hit: what is read, or that it is damaged."""
    chance = random.Random(seed)
    ring, path = open_ring(tmp_path / "ring", num_records=64), tmp_path / "journal"
    for number in range(80):
        begin(ring, number, seq=number)
    ring.close(1)
    writer = JournalWriter(path, rank=0)
    for number in range(200):
        writer.write("thing", {"number": number})
    writer.close()
    for file in (tmp_path / "ring", path):
        data = bytearray(file.read_bytes())
        for _ in range(chance.choice((1, 20, 300))):
            at = chance.choice((chance.randrange(8, 4096), chance.randrange(4096, len(data) - 64)))
            size = chance.choice((1, 8, 64))
            data[at : at + size] = chance.randbytes(size)
        file.write_bytes(data)
        with suppress(RecordError):
            read_ring(file) if file.name == "ring" else read_journal(file)


def test_journal_reader_gives_each_entry_once_and_begins_anew_with_a_new_process(tmp_path: Path) -> None:
    """The second process counts its entries from 1 again, and all of them are read."""
    path = tmp_path / "rank0.journal"
    reader = JournalFollower(path)
    assert reader.read() == ()
    code = (
        "import sys; from ddpilot.record.journal import JournalWriter\n"
        "writer = JournalWriter(sys.argv[1], rank=0)\n"
        "for number in range(3): writer.write('first', {})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=20)
    assert [entry.index for entry in reader.read()] == [1, 2, 3]
    assert reader.read() == ()
    writer = JournalWriter(path, rank=0)
    assert reader.read() == ()
    writer.write("second", {})
    assert [(entry.index, entry.kind) for entry in reader.read()] == [(1, "second")]
    writer.write("second", {})
    assert [entry.index for entry in reader.read()] == [2]
