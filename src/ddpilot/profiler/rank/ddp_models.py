# SPDX-License-Identifier: Apache-2.0
"""Note the options and buckets of DDP models, and whether their search for unused parameters ever finds one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.probe import Notes


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
