# SPDX-License-Identifier: Apache-2.0
"""How much of one core the analysis of many ranks takes: ``python -m benchmarks.watch_analysis``.

64 rings as files, which are read and explained; 4,096 ranks as values; and looks at ranks that get on.
Processor time, so that what else runs on the machine does not count.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ddpilot.findings.display import render_text
from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.log import CallSite, Collective, DdpPart, GroupOfRanks, RankLog, Tensor, pack_ranks
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.flight_ring.writer import RingWriter
from ddpilot.watch.analysis import Analysis, analyze
from ddpilot.watch.observer import Observer
from ddpilot.watch.options import WatchOptions
from ddpilot.watch.snapshot.model import JobSnapshot, ProcessState, RankSnapshot

NOW_NS = 10**12
_LINE = {"file": "train.py", "line": 88, "function": "train", "text": "loss.backward()", "via": "Tensor.backward"}
_BARRIER = {"file": "train.py", "line": 91, "function": "train", "text": "dist.barrier()", "via": "barrier"}


def _open(path: Path) -> RingWriter:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    ring = RingWriter(fd, num_records=8192, page_bytes=256 * 1024)
    os.close(fd)
    return ring


class GrowingRing:
    """The ring of a rank that does one all_reduce after the other."""

    def __init__(self, path: Path, rank: int, num_ranks: int) -> None:
        group = {"name": "0", "incarnation": 1, "size": num_ranks, "rank": rank, "ranks": pack_ranks(range(num_ranks))}
        tensors = {"inputs": [["float32", [1000], "cpu"]], "num_inputs": 1}
        self._ring = _open(path)
        facts = ({"op": "all_reduce", "operator": "c10d::allreduce_"}, group, _LINE, tensors)
        refs = [self._ring.write_fact(fact) for fact in facts]
        self._usual = layout.USUAL.pack(*refs, *[layout.NO_NUMBER] * 3, layout.ASYNC | layout.ASKED_ANY_TIME, 4000)
        self._num_done = 0
        about = {"rank": rank, "pid": os.getpid(), "host": "node", "torch": "2.13"}
        self._ring.publish({**about, "started_ns": 1, "started_unix_ns": 1})

    def run(self, now_ns: int, num: int) -> None:
        """It has done `num` more in the last quarter of a second."""
        for number in range(num):
            start_ns = now_ns - 250_000_000 + 250_000_000 * number // num
            index = self._ring.begin(start_ns, self._num_done, 4711, 0, self._usual)
            self._ring.set_reduce_op(index, 0)
            self._ring.finish(index, start_ns + 1000, layout.DONE)
            self._num_done += 1


def write_ring(path: Path, rank: int, num_ranks: int, num_records: int, odd: int) -> None:
    """A ring of a rank that has done `num_records` all_reduces, the last of them a barrier on the rank `odd`."""
    ring = _open(path)
    group = {"name": "0", "incarnation": 1, "size": num_ranks, "rank": rank, "ranks": pack_ranks(range(num_ranks))}
    refs = [
        ring.write_fact(fact)
        for fact in (
            {"op": "all_reduce", "operator": "c10d::allreduce_"},
            {"op": "barrier", "operator": "c10d::barrier"},
            group,
            _LINE,
            _BARRIER,
            {"inputs": [["float32", [1000], "cpu"]], "num_inputs": 1},
        )
    ]
    none = [layout.NO_NUMBER] * 3
    usual = layout.USUAL.pack(refs[0], refs[2], refs[3], refs[5], *none, layout.ASYNC | layout.ASKED_ANY_TIME, 4000)
    barrier = layout.USUAL.pack(refs[1], refs[2], refs[4], 0, *none, layout.NOT_ASYNC | layout.ASKED_ANY_TIME, 0)
    for number in range(num_records):
        is_odd = rank == odd and number == num_records - 1
        start_ns = NOW_NS - (num_records - number) * 1_000_000
        index = ring.begin(start_ns, number, 4711, 0, barrier if is_odd else usual)
        if number < num_records - 1:
            ring.set_reduce_op(index, 0)
            ring.finish(index, start_ns + 500_000, layout.DONE)
    about = {"rank": rank, "pid": 4000 + rank, "host": "node", "torch": "2.13"}
    ring.publish({**about, "started_ns": 1, "started_unix_ns": 1})
    ring.close(0)


def make_log(rank: int, ranks: tuple[int, ...], num_entries: int, odd: int) -> RankLog:
    """The same as a value, with a log's own facts, as reading makes them."""
    group = GroupOfRanks(name="0", incarnation=1, ranks=ranks, size=len(ranks), rank=rank)
    inputs = (Tensor(dtype="float32", shape=(1000,), device="cpu"),)
    part = DdpPart(what="bucket", model="Net", index=0, num_buckets=1, names=("a.weight", "a.bias"), num_parameters=2)
    common: dict[str, Any] = {"group": group, "thread": 1, "operator": "", "is_async": True}
    entries = [
        Collective(
            index=number + 1000,
            op="barrier" if rank == odd and number == num_entries - 1 else "all_reduce",
            seq=number + 999,
            inputs=() if rank == odd and number == num_entries - 1 else inputs,
            ddp=None if rank == odd and number == num_entries - 1 else part,
            line=CallSite(**(_BARRIER if rank == odd and number == num_entries - 1 else _LINE)),  # type: ignore[arg-type]
            start_ns=NOW_NS - (num_entries - number) * 10**7,
            state="done" if number < num_entries - 1 else "begun",
            reduce_op=None if rank == odd and number == num_entries - 1 else "SUM",
            **common,
        )
        for number in range(num_entries)
    ]
    about: dict[str, Any] = {"pid": 4000 + rank, "host": "node", "torch": "", "started_ns": 1}
    counts: dict[str, Any] = {"started_unix_ns": 1, "heartbeat_ns": NOW_NS, "closed_ns": None, "num_torn": 0}
    num_begun = 999 + num_entries
    return RankLog(
        rank=rank, num_begun=num_begun, num_faults=0, first_fault="", collectives=tuple(entries), **about, **counts
    )


def view_of(logs: list[RankLog]) -> JobSnapshot:
    """All of them alive, three seconds after the last began."""
    ranks = {
        log.rank: RankSnapshot(rank=log.rank, log=log, process=ProcessState(pid=log.pid, state="running"))
        for log in logs
    }
    return JobSnapshot(world_size=len(logs), ranks=ranks, now_ns=NOW_NS + 3 * 10**9)


def explain_rings(folder: Path, num_ranks: int) -> tuple[float, float, Analysis]:
    """Seconds to read the newest 512 records of each ring and to explain them; and what is said."""
    begun = time.process_time()
    logs = [read_ring(folder / f"rank{rank}.ring", newest=512) for rank in range(num_ranks)]
    read = time.process_time()
    analysis = analyze(view_of(logs))
    return read - begun, time.process_time() - read, analysis


def watch_growing(num_ranks: int) -> float:
    """Milliseconds of a look of the observer, four of which it takes a second, at ranks that get on."""
    with tempfile.TemporaryDirectory() as name:
        rings = [GrowingRing(Path(name) / f"rank{rank}.ring", rank, num_ranks) for rank in range(num_ranks)]
        observer = Observer(Path(name), num_ranks, facts=dict, notify=lambda _report: None, options=WatchOptions())
        took = []
        for _ in range(30):
            for ring in rings:
                ring.run(time.monotonic_ns(), 50)
            begun = time.process_time()
            observer._step()
            took.append(time.process_time() - begun)
            time.sleep(0.25)
    return statistics.median(took[5:]) * 1e3


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(64):
            write_ring(folder / f"rank{rank}.ring", rank, 64, 8192, odd=17)
        reading, explaining, analysis = explain_rings(folder, 64)
    print(f"64 rings: read in {reading:.2f} s, explained in {explaining:.2f} s")
    ranks = tuple(range(4096))
    for label, odd in (("one rank differs", 17), ("all agree", -1)):
        view = view_of([make_log(rank, ranks, 256, odd) for rank in ranks])
        begun = time.process_time()
        analysis = analyze(view)
        took = time.process_time() - begun
        text = render_text(analysis.findings, 120) if analysis.findings else "\n".join(analysis.status)
        print(f"4,096 ranks, 256 records each, {label}: {took:.2f} s, {len(text.splitlines())} lines")
        if odd >= 0:
            print(text)
    for num_ranks in (2, 64):
        print(f"{num_ranks} ranks with 200 collectives a second each: {watch_growing(num_ranks):.1f} ms a look")


if __name__ == "__main__":
    main()
