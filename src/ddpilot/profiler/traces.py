# SPDX-License-Identifier: Apache-2.0
"""Trace files of the ranks: `trace_rank_<r>.json.gz`, and all of them in one `trace.json.gz`. Does not import torch."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from ddpilot.profiler.clocks import ClockOffset

CLOCK_KEY = "ddpilot_clock"
"""Key of a trace with the name of the rank's clock, and the wall clock minus CLOCK_MONOTONIC when it was written."""
_MERGED = "trace.json.gz"
_OWN_NAME = re.compile(r"trace(_rank_\d+(_\d+)?)?\.json\.gz")
_MAX_PROCESSES = 1000
"""Processes, and kinds of events that have no process, of one rank."""
_SAME_CLOCK: Mapping[str, ClockOffset | None] = {}


@dataclass(frozen=True)
class MergedTrace:
    """The trace of all ranks."""

    path: Path
    error_s: float
    """How far the clocks of two ranks can be off; 0.0 on one node."""
    unaligned: tuple[int, ...] = ()
    """Ranks whose clock was not compared with the first rank's: their times are those of their wall clock."""


def trace_path(folder: Path, rank: int, cycle: int = 0) -> Path:
    """Return the path of the trace of `rank`. `cycle`: counts from 0 where the window is repeated."""
    return folder / f"trace_rank_{rank}{f'_{cycle + 1}' if cycle else ''}.json.gz"


def find_traces(folder: Path, rank: int) -> Iterator[Path]:
    """Yield the traces that `rank` has written, in order."""
    cycle = 0
    while (path := trace_path(folder, rank, cycle)).exists():
        yield path
        cycle += 1


def remove_traces(folder: Path) -> None:
    """Remove the traces that an earlier profile has written into `folder`.

    A run with fewer ranks, cycles or updates would leave some of them, and they would be merged with its own.
    """
    for path in folder.iterdir():
        if _OWN_NAME.fullmatch(path.name):
            path.unlink()


def merge_traces(
    folder: Path, ranks: Sequence[int], offsets: Mapping[str, ClockOffset | None] = _SAME_CLOCK
) -> MergedTrace | None:
    """Write the traces of `ranks` into one file; None if no rank has written one.

    The times of all ranks count from the same moment of the first rank's clock. Processes are named after their rank,
    and come in the order of the ranks. `offsets`: as of `find_offsets`; empty if all ranks have one clock.
    """
    events: list[dict[str, Any]] = []
    first_ns: int | None = None
    first_clock: Mapping[str, Any] = {}
    error_ns, unaligned = 0, []
    for rank in ranks:
        names: dict[Any, int] = {}
        for path in find_traces(folder, rank):
            with gzip.open(path, "rt", encoding="utf-8") as file:
                trace = json.load(file)
            begin_ns, clock = int(trace.get("baseTimeNanoseconds", 0)), trace.get(CLOCK_KEY, {})
            offset = offsets.get(clock.get("name", ""))
            first_clock = first_clock or clock
            if offset is not None:
                begin_ns = _on_first_clock(begin_ns, clock, offset, first_clock)
                error_ns = max(error_ns, offset.error_ns)
            elif clock.get("name") != first_clock.get("name") and rank not in unaligned:
                unaligned.append(rank)
            first_ns = begin_ns if first_ns is None else first_ns
            events += _move_events(trace["traceEvents"], rank, names, (begin_ns - first_ns) / 1e3)
        events += _name_processes(names, rank)
    if not events:
        return None
    merged = folder / _MERGED
    notes = {"clock_error_us": error_ns / 1e3, "ranks_with_another_clock": unaligned}
    with gzip.open(merged, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms", "ddpilot": notes}, file)
    return MergedTrace(merged, error_ns / 1e9, tuple(unaligned))


def _on_first_clock(wall_ns: int, clock: Mapping[str, Any], offset: ClockOffset, first_clock: Mapping[str, Any]) -> int:
    """Return a time of a node's wall clock on the first rank's wall clock, by way of both CLOCK_MONOTONICs.

    These were compared while the job ran, and no time service sets them.
    """
    own_ns = wall_ns - int(clock["wall_minus_monotonic_ns"])
    theirs_ns = int(offset.to_first(numpy.array([own_ns], dtype=numpy.int64))[0])
    return theirs_ns + int(first_clock["wall_minus_monotonic_ns"])


def _move_events(
    events: Sequence[dict[str, Any]], rank: int, names: dict[Any, int], shift_us: float
) -> Iterator[dict[str, Any]]:
    """Yield the events with process ids of their own, which are added to `names`, `shift_us` later."""
    for event in events:
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_labels", "process_sort_index"):
            continue
        pid = names.setdefault(event.get("pid"), rank * _MAX_PROCESSES + len(names))
        changed = {**event, "pid": pid}
        if "ts" in event:
            changed["ts"] = event["ts"] + shift_us
        if "id" in event:
            changed["id"] = f"{rank}.{event['id']}"  # arrows lead from one event of a rank to another
        yield changed


def _name_processes(names: Mapping[Any, int], rank: int) -> Iterator[dict[str, Any]]:
    for name, pid in names.items():
        label = f"rank {rank}" if isinstance(name, int) else f"rank {rank}: {name}"
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
