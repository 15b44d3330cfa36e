# SPDX-License-Identifier: Apache-2.0
"""Recordings as ranks write them, for tests of reports: a rank that is late in loading data, memory that grows."""

from __future__ import annotations

import random
from pathlib import Path

from ddpilot.findings.display import Findings
from ddpilot.profiler.scaling.result import Scaling, ScalingRow
from ddpilot.profiler.spans_file import PHASES, TimesWriter

MS = 1_000_000
LATE_RANK = 1


def write_recording(folder: Path, num_ranks: int, num_updates: int, *, has_device: bool = False) -> None:
    """Updates of about 20 ms: `LATE_RANK` loads data for 4 to 7 ms longer than the others in nine of ten updates."""
    numbers = random.Random(0)
    all_spans: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_ranks)]
    all_buckets: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    """Two in an update: one while backward computes for 2 ms, and one after its last gradient."""
    ends = []
    data, forward, backward, communication, optimizer = (
        PHASES.index(name) for name in ("data", "forward", "backward", "communication", "optimizer")
    )
    end = 0
    for _ in range(num_updates):
        begin, ready, spans = end, [], []
        for rank in range(num_ranks):
            is_late = rank == LATE_RANK and numbers.random() < 0.9
            loaded = begin + int(MS * (numbers.uniform(0.3, 0.6) + is_late * numbers.uniform(4, 7)))
            computed = loaded + int(MS * numbers.uniform(3.2, 3.6))
            ready.append(computed + int(MS * numbers.uniform(6.2, 7)))
            spans.append([(begin, loaded, data, 0), (loaded + MS // 5, computed, forward, -1)])
        reduced = max(ready) + 3 * MS
        end = reduced + 2 * MS
        ends.append(end)
        for rank, (load, compute) in enumerate(spans):
            exchanged = (ready[rank], reduced, communication, -1)
            rest = [(compute[1] + MS // 10, reduced + MS // 10, backward, -1), (reduced + MS, end, optimizer, -1)]
            all_spans[rank] += [load, compute, exchanged, *rest]
            all_buckets[rank] += [(ready[rank] - 3 * MS, ready[rank] - MS, 10**6), (ready[rank], reduced, 10**6)]
    for rank in range(num_ranks):
        writer = TimesWriter(folder, rank)
        writer.write_buckets(all_buckets[rank])
        writer.write_spans(all_spans[rank])
        writer.write_updates([(end, 32) for end in ends])
        grown = [int(2e8 + 1e6 * rank + 2e5 * update) for update in range(num_updates)]
        writer.write_memory(
            [(end, size, 10 * size if has_device else -1) for end, size in zip(ends, grown, strict=True)]
        )
        writer.write_fact("clock", "one")
        writer.write_fact("site", [0, "train.py", 7, "train", "for x, y in loader:"])


def make_scaling() -> Scaling:
    """Four numbers of ranks, of which the last shares cores."""
    lost = {"exposed communication": 0.2, "stragglers and barriers": 0.05, "smaller batch per rank": 0.05}
    rows = [(1, 1.0, {}), (2, 1.7, {"exposed communication": 0.15}), (4, 2.9, lost), (8, 4.2, {**lost, "loader": 0.2})]
    made = [
        ScalingRow(
            num_ranks=num,
            samples_per_s=600 * speed_up,
            spread=(582 * speed_up, 615 * speed_up),
            speed_up=speed_up,
            efficiency=speed_up / num,
            lost=causes,
            is_fair=num < 8,
        )
        for num, speed_up, causes in rows
    ]
    return Scaling(title="train.py", kind="weak", rows=tuple(made), findings=Findings())
