# SPDX-License-Identifier: Apache-2.0
"""Note the options and buckets of DDP models, time the buckets, and read what DDP itself has logged of them.

The flight recorder sees each collective of the reducer start, but polls for their ends, which it sees up to 50 ms late.
Here the end comes from a callback of the work's future, which costs some 10 us. Every second update is timed, or fewer
if updates have many collectives: two callbacks in an update on average.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import RecordError
from ddpilot.group.measurements import time_all_reduce
from ddpilot.guard.probe import Notes
from ddpilot.profiler.rank.device_clock import DeviceClock
from ddpilot.record.collectives.recorder import reducer_observers
from ddpilot.record.collectives.start_stop import Recording, start_recording


class DdpModels:
    """The DDP models of this rank. `write_fact` writes a fact of the rank."""

    def __init__(self, notes: Notes, write_fact: Callable[[str, Any], None]) -> None:
        self._notes = notes
        self._write_fact = write_fact
        self._parameter_bytes = -1
        self.search_ns = 0
        """How long DDP has looked for unused parameters; the caller subtracts what it has taken."""
        self._sites: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._least_used: dict[int, tuple[torch.Tensor, int]] = {}  # numbers of ranks, and of how many

    def install(self) -> Callable[[], None]:
        """Start observing; returns the function that stops it."""
        begins = self._search_begins
        return self._notes.around(DistributedDataParallel, "_post_forward", before=begins, after=self._search_ends)

    def add(self, ddp: Any, site: int) -> None:
        """Observe a model. `site`: the number of the line that creates it."""
        self._sites[ddp] = site
        self._write(ddp, site)

    def write(self) -> None:
        """Write the options again, with the buckets that DDP has built since."""
        self._parameter_bytes = -1
        for ddp, site in list(self._sites.items()):
            self._write(ddp, site)

    def _write(self, ddp: Any, site: int) -> None:
        """Write the options of the largest model."""
        parameters = list(ddp.module.parameters())
        parameter_bytes = sum(each.numel() * each.element_size() for each in parameters)
        if parameter_bytes < self._parameter_bytes:
            return
        self._parameter_bytes = parameter_bytes
        logged = ddp._get_ddp_logging_data() if getattr(ddp, "logger", None) is not None else {}
        sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
        values = {
            "parameter_bytes": parameter_bytes,
            "num_parameters": len(parameters),
            "num_buckets": len(sizes.split(",")) if sizes else 0,
            "num_sync_batch_norms": sum(isinstance(each, torch.nn.SyncBatchNorm) for each in ddp.module.modules()),
            "has_comm_hook": "comm_hook" in logged,
            "bucket_cap_mb": ddp.bucket_bytes_cap / 2**20,
            "find_unused_parameters": ddp.find_unused_parameters,
            "static_graph": ddp.static_graph,
            "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
            "backend": dist.get_backend(ddp.process_group),
        }
        if site >= 0:
            values["site"] = site
        self._write_fact("ddp", values)

    def _search_begins(self, ddp: Any, *_: Any) -> int:
        does_search = ddp.find_unused_parameters and not ddp.static_graph and torch.is_grad_enabled()
        return time.monotonic_ns() if does_search and ddp.require_backward_grad_sync else 0

    def _search_ends(self, begin_ns: int, *_: Any) -> None:
        if begin_ns:
            self.search_ns += time.monotonic_ns() - begin_ns

    def reduced(self, models: Iterable[Any]) -> None:
        """Call after a backward pass with the models that were reduced: notes on how many ranks parameters were used.

        The numbers stay on the device, so that nothing waits for them.
        """
        for ddp in models:
            if ddp.find_unused_parameters and not ddp.static_graph:
                used, least = ddp.reducer._get_local_used_map(), self._least_used.get(id(ddp))
                now = used.clone() if least is None else torch.minimum(least[0], used)
                self._least_used[id(ddp)] = now, dist.get_world_size(ddp.process_group)

    def write_unused(self) -> None:
        """Write for how many parameters the search had a use: those that a rank did not use in some update."""
        if self._least_used:
            unused = [int((least < num_ranks).sum()) for least, num_ranks in self._least_used.values()]
            self._write_fact("num_unused_parameters", sum(unused))


_NUM_TIMED = 2
"""Collectives of an update that are timed, on average over updates."""
_NUM_RECORDS, _PAGE_BYTES = 64, 64 * 1024
_SMALL_BYTES, _LEAST_LARGE_BYTES = 8, 4096
_FIRST_READ, _READ_EVERY = 12, 200
"""Updates after which DDP's log is read: it has times of the first ten updates, and of one in a hundred later."""


class BucketTimes:
    """Times buckets, between `install` and the call of the function that this returns.

    `ring`: the file for a flight ring of our own, if this process records none. `num_first`: updates that are not
    timed. `device`: the clock of a device that is used, None on the CPU. `take` returns what was timed.
    """

    def __init__(self, notes: Notes, ring: Path, num_first: int, device: DeviceClock | None = None) -> None:
        self._notes = notes
        self._ring = ring
        self._device = device
        self._num_to_skip = num_first
        self._num_started = 0
        self._done: list[tuple[int, int, int]] = []

    def install(self) -> Callable[[], None]:
        """Start observing; returns the function that stops it."""
        recording = self._record()
        observe = self._notes.safely(self._started)
        reducer_observers.append(observe)

        def stop() -> None:
            reducer_observers.remove(observe)
            recording.stop()

        return stop

    def _record(self) -> Recording:
        try:
            return start_recording(self._ring, rank=self._notes.rank, num_records=_NUM_RECORDS, page_bytes=_PAGE_BYTES)
        except RecordError:  # it records already
            return Recording()

    def end_update(self) -> None:
        """Call after each update: it decides whether the next one is timed."""
        if self._num_to_skip:
            self._num_to_skip -= 1
        elif self._num_started:
            self._num_to_skip, self._num_started = max(1, self._num_started // _NUM_TIMED - 1), 0

    def take(self) -> list[tuple[int, int, int]]:
        """Return begin, end and bytes of the collectives that have ended since the last call."""
        taken, self._done = self._done, []
        return taken

    def _started(self, begin_ns: int, num_bytes: int, boxed: Any) -> None:
        if self._num_to_skip:
            return
        work = Work.unbox(boxed)
        if work is not None:
            self._num_started += 1
            if self._device is not None:
                begin_ns = self._device.now_beside()
            work.get_future().add_done_callback(functools.partial(self._ended, begin_ns, num_bytes))

    def _ended(self, begin_ns: int, num_bytes: int, _: Any) -> None:
        end_ns = time.monotonic_ns() if self._device is None else self._device.now_beside()
        self._done.append((begin_ns, end_ns, num_bytes))


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
