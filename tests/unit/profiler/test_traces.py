# SPDX-License-Identifier: Apache-2.0
"""How the traces of ranks become one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from ddpilot.profiler.clocks import find_offsets
from ddpilot.profiler.traces import CLOCK_KEY, merge_traces, remove_traces, trace_path


def write(folder: Path, rank: int, base_ns: int, ts: float, *, cycle: int = 0, clock: Any = None) -> None:
    """A trace of two events, whose times count from `base_ns`."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
        {"ph": "X", "name": "all_reduce", "pid": 77, "tid": 1, "ts": ts, "dur": 5.0},
        {"ph": "s", "id": 3, "name": "arrow", "pid": "Spans", "tid": 1, "ts": ts},
    ]
    notes = {CLOCK_KEY: clock} if clock else {}
    with gzip.open(trace_path(folder, rank, cycle), "wt", encoding="utf-8") as file:
        json.dump({"baseTimeNanoseconds": base_ns, "traceEvents": events, **notes}, file)


def calls_of(path: Path) -> list[float]:
    """The times of all_reduces in a merged trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event["ts"] for event in json.load(file)["traceEvents"] if event["name"] == "all_reduce"]


def test_times_count_from_the_same_moment_and_ranks_keep_apart(tmp_path: Path) -> None:
    """Rank 1 began to count 2 ms later, at the moment that is 3 ms for rank 0."""
    write(tmp_path, 0, base_ns=1_000_000, ts=3000.0)
    write(tmp_path, 1, base_ns=3_000_000, ts=1000.0)
    merged = merge_traces(tmp_path, [0, 1, 2])
    assert merged is not None
    assert merged.path == tmp_path / "trace.json.gz"
    with gzip.open(merged.path, "rt", encoding="utf-8") as file:
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


def test_traces_of_an_earlier_profile_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    """Among them a second cycle, which would be merged with what a later run has recorded."""
    write(tmp_path, 0, base_ns=0, ts=1.0)
    write(tmp_path, 0, base_ns=0, ts=2.0, cycle=1)
    assert merge_traces(tmp_path, [0]) is not None
    other = tmp_path / "trace_rank_0.json"
    other.write_text("mine", "utf-8")
    remove_traces(tmp_path)
    assert list(tmp_path.iterdir()) == [other]


def test_nodes_are_aligned_by_their_compared_clocks(tmp_path: Path) -> None:
    """Node b's wall clock is 1 s ahead, and its CLOCK_MONOTONIC 3 s behind; the call is at 3 ms of both."""
    second = 10**9
    write(tmp_path, 0, base_ns=100 * second, ts=3000.0, clock={"name": "a", "wall_minus_monotonic_ns": 90 * second})
    write(tmp_path, 1, base_ns=101 * second, ts=3000.0, clock={"name": "b", "wall_minus_monotonic_ns": 94 * second})
    offsets = find_offsets([{"clock": "a"}, {"clock": "b", "clock_offsets": [(7 * second, 3 * second, 50_000)]}])
    merged = merge_traces(tmp_path, [0, 1], offsets)
    assert merged is not None
    assert calls_of(merged.path) == [3000.0, 3000.0]
    assert (merged.error_s, merged.unaligned) == (5e-5, ())


def test_a_node_whose_clock_was_not_compared_is_named(tmp_path: Path) -> None:
    """Its times are those of its wall clock."""
    write(tmp_path, 0, base_ns=0, ts=1.0, clock={"name": "a", "wall_minus_monotonic_ns": 0})
    write(tmp_path, 1, base_ns=0, ts=1.0, clock={"name": "b", "wall_minus_monotonic_ns": 0})
    merged = merge_traces(tmp_path, [0, 1], {"a": None})
    assert merged is not None
    assert merged.unaligned == (1,)


def test_all_cycles_of_a_window_are_merged(tmp_path: Path) -> None:
    """Each has a file of its own."""
    write(tmp_path, 0, base_ns=0, ts=1.0)
    write(tmp_path, 0, base_ns=5000, ts=2.0, cycle=1)
    merged = merge_traces(tmp_path, [0])
    assert merged is not None
    assert calls_of(merged.path) == [1.0, 7.0]
