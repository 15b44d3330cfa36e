# SPDX-License-Identifier: Apache-2.0
"""How much of one core the analysis of many ranks takes: ``python -m benchmarks.watch_analysis``.

64 rings as files, which are read and explained; 4,096 ranks as values; and the comparison of growing logs, per record.
Processor time, so that what else runs on the machine does not count.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from ddpilot.findings.as_text import render_text
from ddpilot.record import layout
from ddpilot.record.groups import pack_ranks
from ddpilot.record.log import Collective, DdpPart, GroupOfRanks, Line, RankLog, Tensor
from ddpilot.record.reading import read_ring
from ddpilot.record.ring import RingWriter
from ddpilot.watch.comparer import Comparer
from ddpilot.watch.stall import Analysis, analyze
from ddpilot.watch.view import JobView, ProcessView, RankView

NOW_NS = 10**12
_LINE = {"file": "train.py", "line": 88, "function": "train", "text": "loss.backward()", "via": "Tensor.backward"}
_BARRIER = {"file": "train.py", "line": 91, "function": "train", "text": "dist.barrier()", "via": "barrier"}


def write_ring(path: Path, rank: int, num_ranks: int, num_records: int, odd: int) -> None:
    """A ring of a rank that has done `num_records` all_reduces, the last of them a barrier on the rank `odd`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    ring = RingWriter(fd, num_records=8192, page_bytes=256 * 1024)
    os.close(fd)
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
    about = {"rank": rank, "pid": 4000 + rank, "host": "node", "torch": "2.13", "source": "kernels"}
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
            line=Line(**(_BARRIER if rank == odd and number == num_entries - 1 else _LINE)),  # type: ignore[arg-type]
            start_ns=NOW_NS - (num_entries - number) * 10**7,
            state="done" if number < num_entries - 1 else "begun",
            reduce_op=None if rank == odd and number == num_entries - 1 else "SUM",
            **common,
        )
        for number in range(num_entries)
    ]
    about: dict[str, Any] = {"pid": 4000 + rank, "host": "node", "torch": "", "source": "kernels", "started_ns": 1}
    counts: dict[str, Any] = {"started_unix_ns": 1, "heartbeat_ns": NOW_NS, "closed_ns": None, "num_torn": 0}
    num_begun = 999 + num_entries
    return RankLog(
        rank=rank, num_begun=num_begun, num_faults=0, first_fault="", collectives=tuple(entries), **about, **counts
    )


def view_of(logs: list[RankLog]) -> JobView:
    """All of them alive, three seconds after the last began."""
    ranks = {
        log.rank: RankView(rank=log.rank, log=log, process=ProcessView(pid=log.pid, state="running")) for log in logs
    }
    return JobView(world_size=len(logs), ranks=ranks, now_ns=NOW_NS + 3 * 10**9)


def explain_rings(folder: Path, num_ranks: int) -> tuple[float, float, Analysis]:
    """Seconds to read the newest 512 records of each ring and to explain them; and what is said."""
    begun = time.process_time()
    logs = [read_ring(folder / f"rank{rank}.ring", newest=512) for rank in range(num_ranks)]
    read = time.process_time()
    analysis = analyze(view_of(logs))
    return read - begun, time.process_time() - read, analysis


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
    logs = [make_log(rank, tuple(range(8)), 2000, -1) for rank in range(8)]
    comparer = Comparer(range(8))
    begun = time.process_time()
    for log in logs:
        comparer.feed(log, NOW_NS)
    print(f"growing logs: {(time.process_time() - begun) / 16_000 * 1e6:.2f} us per record")


if __name__ == "__main__":
    main()
