# SPDX-License-Identifier: Apache-2.0
"""Trace files of the ranks: `trace_rank_<r>.json.gz`, and all of them in one `trace.json.gz`. Does not import torch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

_MERGED = "trace.json.gz"
_MAX_PROCESSES = 1000
"""Processes, and kinds of events that have no process, of one rank."""


def trace_path(folder: Path, rank: int) -> Path:
    """Return the path of the trace of `rank`."""
    return folder / f"trace_rank_{rank}.json.gz"


def merge_traces(folder: Path, ranks: list[int]) -> Path | None:
    """Write the traces of `ranks` into one file and return its path; None if no rank has written one.

    The times of all ranks count from the same moment: those of one machine are those of its clock. Processes are named
    after their rank, and come in the order of the ranks.
    """
    events: list[dict[str, Any]] = []
    first_ns: int | None = None
    for rank in ranks:
        path = trace_path(folder, rank)
        if not path.exists():
            continue
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        begin_ns = int(trace.get("baseTimeNanoseconds", 0))
        first_ns = begin_ns if first_ns is None else first_ns
        events += _of_rank(trace["traceEvents"], rank, (begin_ns - first_ns) / 1e3)
    if not events:
        return None
    merged = folder / _MERGED
    with gzip.open(merged, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    return merged


def _of_rank(events: list[dict[str, Any]], rank: int, shift_us: float) -> list[dict[str, Any]]:
    """Return the events with process ids of their own, `shift_us` later."""
    names: dict[Any, int] = {}
    found: list[dict[str, Any]] = []
    for event in events:
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_labels", "process_sort_index"):
            continue
        pid = names.setdefault(event.get("pid"), rank * _MAX_PROCESSES + len(names))
        changed = {**event, "pid": pid}
        if "ts" in event:
            changed["ts"] = event["ts"] + shift_us
        if "id" in event:
            changed["id"] = f"{rank}.{event['id']}"  # arrows lead from one event of a rank to another
        found.append(changed)
    for name, pid in names.items():
        label = f"rank {rank}" if isinstance(name, int) else f"rank {rank}: {name}"
        found.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}})
        found.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    return found
