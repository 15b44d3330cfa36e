# SPDX-License-Identifier: Apache-2.0
"""Measure the group of a DDP model, and read what DDP itself has logged of its buckets: for the model of scaling."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any
from weakref import ref

from ddpilot.group.measurements.all_reduce import time_all_reduce

_SMALL_BYTES, _LEAST_LARGE_BYTES = 8, 4096
_FIRST_READ, _READ_EVERY = 12, 200
"""Updates after which DDP's log is read: it has times of the first ten updates, and of one in a hundred later."""


class Buckets:
    """Facts about the last DDP model that was made. `write_fact`: called with a name and a value."""

    def __init__(self, write_fact: Callable[[str, Any], None]) -> None:
        self._write_fact = write_fact
        self._ddp: ref[Any] | None = None
        self._num_updates = 0

    def add(self, ddp: Any, *, measures: bool) -> None:
        """Call after a DDP model was made, which is collective; so is this with `measures`."""
        self._ddp = ref(ddp)
        group = ddp.process_group
        if not measures or group.size() < 2:
            return
        total = sum(each.numel() * each.element_size() for each in ddp.module.parameters() if each.requires_grad)
        sizes = (_SMALL_BYTES, int(max(_LEAST_LARGE_BYTES, min(total, ddp.bucket_bytes_cap))))
        times_s = time_all_reduce(group, next(ddp.module.parameters()).device, sizes)
        medians = [[size, statistics.median(each)] for size, each in zip(sizes, times_s, strict=True)]
        self._write_fact("all_reduce_s", medians)

    def end_update(self) -> None:
        """Call after each update."""
        self._num_updates += 1
        if self._num_updates == _FIRST_READ or self._num_updates % _READ_EVERY == 0:
            self.read()

    def read(self) -> None:
        """Write the bytes of each bucket, in the order in which they are ready, and times that DDP has logged."""
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is None or not hasattr(ddp, "reducer"):
            return
        logged = ddp._get_ddp_logging_data()
        sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
        times = {
            "backward_ns": logged.get("avg_backward_compute_time", 0),
            "overlap_ns": logged.get("avg_backward_compute_comm_overlap_time", 0),
        }
        self._write_fact("ddp_times", times)
        self._write_fact("buckets", [int(each) for each in sizes.split(",") if each.strip().isdecimal()])
