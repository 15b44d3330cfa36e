# SPDX-License-Identifier: Apache-2.0
"""What the options of a loader may be, so that a wrong one is answered in its own words and not from torch's depths."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ddpilot.errors import DataError

WORKER_OPTIONS = (
    "num_workers",
    "pin_memory",
    "worker_init_fn",
    "persistent_workers",
    "prefetch_factor",
    "timeout",
    "multiprocessing_context",
)
"""Those of torch's DataLoader that a loader of ours takes too."""

_INSTEAD = {
    "batch_size": "Say `global_batch_size`, samples of all ranks together, or `batch_size_per_rank`.",
    "sampler": "Give `weights`, or a DataLoader that has the sampler to loop.shard().",
    "batch_sampler": "Give a DataLoader that has it to loop.shard().",
    "generator": "Give `seed`: the order follows from it on every rank.",
    "in_order": "Leave it out: batches come in order.",
}
_OF_STREAMS = {
    "shuffle": "An iterable dataset has the order that it yields: shuffle in it, with Python's, numpy's or torch's "
    "global random state, which is the same on all ranks.",
    "weights": "An iterable dataset has the order that it yields: draw by weight in it.",
    "cache": "Leave it out, or give a dataset with `__len__` and `__getitem__`.",
}


def check_options(options: Mapping[str, Any], rank: int, *, is_stream: bool) -> None:
    """`DataError` for an option that a loader does not have, or has only with workers."""
    did = "making a loader" + (" of an iterable dataset" if is_stream else "")
    instead = {**_INSTEAD, **(_OF_STREAMS if is_stream else {})}
    for name, value in options.items():
        if name in WORKER_OPTIONS:
            continue
        close = difflib.get_close_matches(name, [*WORKER_OPTIONS, "shuffle", "drop_last", "shares", "collate_fn"], 1)
        guess = f"Did you mean `{close[0]}`?" if close else "Leave it out."
        raise DataError(did, found=f"`{name}={value!r}`", fix=instead.get(name, guess), rank=rank)
    if options.get("num_workers", 0):
        return
    for name in ("persistent_workers", "prefetch_factor", "timeout"):
        if options.get(name):
            found = f"`{name}={options[name]!r}` without workers"
            raise DataError(did, found=found, fix="Give `num_workers` of at least 1, or leave it out.", rank=rank)


def check_size(name: str, size: object, rank: int) -> None:
    """`DataError` unless `size` is a whole number or None."""
    if size is not None and (isinstance(size, bool) or not hasattr(size, "__index__")):
        found = f"`{name}={size!r}`"
        raise DataError("making a loader", found=found, fix="Give a whole number of samples.", rank=rank)
