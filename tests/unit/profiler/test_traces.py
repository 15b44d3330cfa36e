# SPDX-License-Identifier: Apache-2.0
"""How the traces of ranks become one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from ddpilot.profiler.traces import merge_traces, trace_path


def write(folder: Path, rank: int, base_ns: int, ts: float) -> None:
    """A trace of two events, whose times count from `base_ns`."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
        {"ph": "X", "name": "all_reduce", "pid": 77, "tid": 1, "ts": ts, "dur": 5.0},
        {"ph": "s", "id": 3, "name": "arrow", "pid": "Spans", "tid": 1, "ts": ts},
    ]
    with gzip.open(trace_path(folder, rank), "wt", encoding="utf-8") as file:
        json.dump({"baseTimeNanoseconds": base_ns, "traceEvents": events}, file)


def test_times_count_from_the_same_moment_and_ranks_keep_apart(tmp_path: Path) -> None:
    """Rank 1 began to count 2 ms later, at the moment that is 3 ms for rank 0."""
    write(tmp_path, 0, base_ns=1_000_000, ts=3000.0)
    write(tmp_path, 1, base_ns=3_000_000, ts=1000.0)
    merged = merge_traces(tmp_path, [0, 1, 2])
    assert merged == tmp_path / "trace.json.gz"
    with gzip.open(merged, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    calls = [event for event in events if event["name"] == "all_reduce"]
    assert [event["ts"] for event in calls] == [3000.0, 3000.0]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[event["pid"]] for event in calls] == ["rank 0", "rank 1"]
    assert set(names.values()) == {"rank 0", "rank 1", "rank 0: Spans", "rank 1: Spans"}
    assert len({event["id"] for event in events if "id" in event}) == 2


def test_without_traces_there_is_no_file(tmp_path: Path) -> None:
    """A script with too few updates."""
    assert merge_traces(tmp_path, [0, 1]) is None
    assert not list(tmp_path.iterdir())
