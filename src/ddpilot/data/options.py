# SPDX-License-Identifier: Apache-2.0
"""`LoaderOptions`, validated; errors name the wrong option and the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpilot.errors import DataError, DdpilotError, did_you_mean

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of `Loop.loader`, and of `Trainer.fit` as `loader=`.

    `pin_memory`, `worker_init_fn`, `persistent_workers`, `prefetch_factor`, `timeout` and `multiprocessing_context` are
    those of `torch.utils.data.DataLoader`.
    """

    global_batch_size: int | None = None
    """Number of samples of all ranks together in a batch; results are the same at any world size. Or pass
    `batch_size_per_rank`."""
    batch_size_per_rank: int | None = None
    """Number of samples of each rank in a batch. In `Loop.prepare_data_loader`: True if the DataLoader's `batch_size`
    is that of each rank."""
    shuffle: bool | None = None
    """True: a different order in each epoch. None: False, or in a fit the fit's `shuffle`. Not for iterable datasets.
    With a dataset of shards, the order of the shards changes, and `shuffle_buffer` samples of a shard are permuted."""
    shuffle_buffer: int = 128
    """For a dataset of shards with `shuffle`: number of consecutive samples of each open shard that are in memory and
    permuted. 1: only the order of the shards changes."""
    num_lanes: int = 64
    """For a dataset of shards: maximum number of shards that all ranks together read at the same time. The order of the
    samples depends on it. Use at least the number of ranks times that of workers, so that each shard is read by one
    worker only."""
    drop_last: bool = False
    """True: leave out a last batch that is smaller, on all ranks alike."""
    batch_split: Sequence[float] | None = None
    """The part of each batch that a rank takes, such as [2, 1]; None: equal parts."""
    weights: Sequence[float] | NDArray[np.float64] | None = None
    """A weight for each sample: an epoch has `num_draws` samples, drawn by weight. None: each sample once. Map-style
    datasets only."""
    num_draws: int | None = None
    """With `weights`: number of samples in an epoch; None: the length of the dataset."""
    replacement: bool = True
    """With `weights`: True if a sample can be drawn several times in an epoch."""
    collate_fn: Collate | None = None
    """Makes a batch from a list of samples; None: torch's `default_collate`."""
    seed: int | None = None
    """Seed for the order, and for the random state while samples are read; None: the loop's seed."""
    seed_samples: bool = True
    """True: while a sample is read, Python's, NumPy's and torch's random state is a function of (seed, epoch, index).
    Augmentation then does not depend on the number of ranks and workers. For an iterable dataset it is a function of
    (seed, epoch, position), and the ranks compare its first samples. False: nothing is seeded, and a dataset's
    `__getitems__` is used if it has one."""
    empty_ranks: bool = False
    """True: a batch may have fewer samples than there are ranks. For iterable datasets and
    `Loop.prepare_data_loader`."""
    divides_itself: bool = False
    """True: an iterable dataset calls `torch.utils.data.get_worker_info()` and yields that part only, of ranks x
    `num_workers` parts. Ranks may then have different numbers of batches, and the order depends on the number of parts.
    False: every worker of every rank reads the whole stream and keeps its part, so `iter(dataset)` has to yield the
    same samples in every process."""
    num_workers: int = 0
    """Processes of each rank that read samples."""
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    timeout: float = 0
    multiprocessing_context: Any = None


_NAMES = tuple(field.name for field in fields(LoaderOptions))
WORKER_OPTIONS = _NAMES[_NAMES.index("num_workers") :]
"""Options that are passed to torch's DataLoader."""
DATA_LOADER_OPTIONS = ("batch_size_per_rank", "batch_split", "divides_itself", "seed_samples", "empty_ranks", "seed")
_OF_MAPS = ("shuffle", "weights", "num_draws", "replacement")
_OF_STREAMS = ("divides_itself", "empty_ranks")
_OF_SHARDS = ("shuffle_buffer", "num_lanes")

_INSTEAD = {
    "batch_size": "Give `global_batch_size`, the samples of all ranks together, or `batch_size_per_rank`.",
    "sampler": "Give `weights`, or a DataLoader that has the sampler to loop.prepare_data_loader().",
    "batch_sampler": "Give a DataLoader that has it to loop.prepare_data_loader().",
    "generator": "Give `seed`, which determines the order on every rank.",
    "in_order": "Leave it out: batches are always in order.",
}
_INSTEAD_IN_STREAMS = {
    **_INSTEAD,
    "shuffle": "An iterable dataset determines its own order: shuffle in it, with Python's, numpy's or torch's global "
    "random state, which is the same on all ranks.",
    **dict.fromkeys(_OF_MAPS[1:], "An iterable dataset determines its own order: draw by weight in it."),
}


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


_INSTEAD_IN_SHARDS = {
    **_INSTEAD,
    **dict.fromkeys(_OF_MAPS[1:], "A dataset of shards is read in the order of its shards: leave it out."),
    "divides_itself": "Leave it out: each rank and worker reads its own shards.",
}


def read_options(
    options: Mapping[str, Any], rank: int, *, is_stream: bool = False, is_sharded: bool = False
) -> LoaderOptions:
    """Return `options` with defaults. Raises `DataError` for an unknown option, or one that requires workers."""
    did = "making a loader" + " of an iterable dataset" * is_stream + " of shards" * is_sharded
    instead = _INSTEAD_IN_STREAMS if is_stream else _INSTEAD_IN_SHARDS if is_sharded else _INSTEAD
    left_out = {*(_OF_MAPS if is_stream else _OF_STREAMS), *_OF_SHARDS}
    if is_sharded:
        left_out = {*_OF_MAPS[1:], "divides_itself"}
    names = [name for name in _NAMES if name not in left_out]
    for name, value in options.items():
        if name not in names and (name, value) != ("shuffle", False):
            raise DataError(did, found=f"`{name}={value!r}`", fix=instead.get(name) or _guess(name, names), rank=rank)
    check_size("num_workers", options.get("num_workers"), rank)
    if not options.get("num_workers", 0):
        for name in ("persistent_workers", "prefetch_factor", "timeout"):
            if options.get(name):
                found = f"`{name}={options[name]!r}` without workers"
                raise DataError(did, found=found, fix="Give `num_workers` of at least 1, or leave it out.", rank=rank)
    return LoaderOptions(**options)


def read_data_loader_options(options: Mapping[str, Any], rank: int) -> LoaderOptions:
    """Return the options of `prepare_data_loader`. Raises `DataError` for others."""
    for name, value in options.items():
        if name in DATA_LOADER_OPTIONS:
            continue
        fix = _guess(name, DATA_LOADER_OPTIONS)
        if name in {"global_batch_size", "batch_size"}:
            fix = "The DataLoader's `batch_size` is that of all ranks; with `batch_size_per_rank=True`, of each."
        elif name in {*_NAMES, *_INSTEAD}:
            fix = "Pass it to the DataLoader, or give its dataset to loop.loader()."
        raise DataError("preparing a DataLoader", found=f"`{name}={value!r}`", fix=fix, rank=rank)
    return LoaderOptions(**options)


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
