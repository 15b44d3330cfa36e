# SPDX-License-Identifier: Apache-2.0
"""Validate loader options; errors name the wrong option and the rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ddpilot.errors import DataError, DdpilotError, did_you_mean

WORKER_OPTIONS = (
    "num_workers",
    "pin_memory",
    "worker_init_fn",
    "persistent_workers",
    "prefetch_factor",
    "timeout",
    "multiprocessing_context",
)
"""DataLoader options that ddpilot's loaders accept too."""

_INSTEAD = {
    "batch_size": "Give `global_batch_size`, the samples of all ranks together, or `batch_size_per_rank`.",
    "sampler": "Give `weights`, or a DataLoader that has the sampler to loop.shard().",
    "batch_sampler": "Give a DataLoader that has it to loop.shard().",
    "generator": "Give `seed`, which determines the order on every rank.",
    "in_order": "Leave it out: batches are always in order.",
}
_OF_STREAMS = {
    "shuffle": "An iterable dataset determines its own order: shuffle in it, with Python's, numpy's or torch's global "
    "random state, which is the same on all ranks.",
    "weights": "An iterable dataset determines its own order: draw by weight in it.",
}
_NAMES = (
    "global_batch_size",
    "batch_size_per_rank",
    "shuffle",
    "drop_last",
    "shares",
    "weights",
    "num_draws",
    "replacement",
    "collate_fn",
    "seed_samples",
    "seed",
    *WORKER_OPTIONS,
)
_OF_SHARDS = ("batch_size_per_rank", "shares", "divides_itself", "seed_samples", "empty_ranks", "seed")


@contextmanager
def naming_rank(rank: int) -> Iterator[None]:
    """Add `rank` to a DdpilotError raised inside, unless it names a rank already."""
    try:
        yield
    except DdpilotError as error:
        if error.rank is None:
            error.rank = rank
            error.args = (error.render(),)
        raise


def check_options(options: Mapping[str, Any], rank: int, *, is_stream: bool) -> None:
    """Raise `DataError` for an unknown option, or one that requires workers."""
    did = "making a loader" + (" of an iterable dataset" if is_stream else "")
    instead = {**_INSTEAD, **(_OF_STREAMS if is_stream else {})}
    names = (*_NAMES, "divides_itself") if is_stream else _NAMES
    for name, value in options.items():
        if name not in WORKER_OPTIONS:
            raise DataError(did, found=f"`{name}={value!r}`", fix=instead.get(name) or _guess(name, names), rank=rank)
    check_size("num_workers", options.get("num_workers"), rank)
    if options.get("num_workers", 0):
        return
    for name in ("persistent_workers", "prefetch_factor", "timeout"):
        if options.get(name):
            found = f"`{name}={options[name]!r}` without workers"
            raise DataError(did, found=found, fix="Give `num_workers` of at least 1, or leave it out.", rank=rank)


def check_shard_options(options: Mapping[str, Any], rank: int) -> None:
    """Raise `DataError` for `options`, which are not arguments of `shard_loader`."""
    for name, value in options.items():
        fix = _guess(name, _OF_SHARDS)
        if name in {"global_batch_size", "batch_size"}:
            fix = "The DataLoader's `batch_size` is that of all ranks; with `batch_size_per_rank=True`, of each."
        elif name in {*_NAMES, *_INSTEAD}:
            fix = "Pass it to the DataLoader, or give its dataset to loop.loader()."
        raise DataError("sharding a DataLoader", found=f"`{name}={value!r}`", fix=fix, rank=rank)


def _guess(name: str, names: Sequence[str]) -> str:
    return did_you_mean(name, names) or f"There are {', '.join(names)}."


def check_size(name: str, size: object, rank: int) -> None:
    """Raise `DataError` unless `size` is an integer or None."""
    if size is not None and (isinstance(size, bool) or not hasattr(size, "__index__")):
        found = f"`{name}={size!r}`"
        raise DataError("making a loader", found=found, fix="Give a whole number.", rank=rank)


def check_batch_size(name: str, size: int | None, rank: int) -> None:
    """Raise `DataError` unless `size` is 1 or more, or None."""
    check_size(name, size, rank)
    if size is not None and size < 1:
        found = f"`{name}={size}`"
        raise DataError("making a loader", found=found, fix="Give at least 1.", rank=rank)
