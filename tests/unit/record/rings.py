# SPDX-License-Identifier: Apache-2.0
"""Write small rings without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.writer import RingWriter

ABOUT: dict[str, Any] = {
    "rank": 3,
    "pid": 4711,
    "host": "node7",
    "started_ns": 5,
    "started_unix_ns": 6,
    "torch": "2.13.0",
    "python": "3.11",
}
GROUP = {"name": "0", "incarnation": 1, "desc": "default_pg", "size": 2, "rank": 1, "ranks": "0-1"}


def open_ring(path: Path, *, num_records: int = 4, page_bytes: int = 4096, publish: bool = True) -> RingWriter:
    """A new ring; readable at once."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    ring = RingWriter(fd, num_records=num_records, page_bytes=page_bytes)
    os.close(fd)
    if publish:
        ring.publish(ABOUT)
    return ring


def begin(
    ring: RingWriter, start_ns: int, *, seq: int = 0, shape: tuple[int, ...] = (2,), flags: int = 0, **group: Any
) -> int:
    """Write an all_reduce of a tensor of `shape` in the default group, changed by `group`, with all facts."""
    facts = (
        {"op": "all_reduce", "operator": "c10d::allreduce_"},
        {**GROUP, **group},
        {"file": "train.py", "line": 88, "function": "step", "text": "loss.backward()", "via": "Tensor.backward"},
        {"inputs": [["float32", list(shape), "cpu"]], "num_inputs": 1},
    )
    refs = [ring.write_fact(fact) for fact in facts]
    usual = layout.USUAL.pack(*refs, *[layout.NO_NUMBER] * 3, flags, 4 * shape[0])
    return ring.begin(start_ns, seq, 4711, 0, usual)
