# SPDX-License-Identifier: Apache-2.0
"""Make a rank's loader for a map-style or an iterable dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ddpilot.data.batches import LocalBatch
from ddpilot.data.division import Division
from ddpilot.data.fetching import Collate
from ddpilot.data.map_loader import ShardedLoader
from ddpilot.data.options import check_batch_size, check_options
from ddpilot.data.plan import Plan
from ddpilot.data.stream_loader import StreamLoader
from ddpilot.data.streams import StreamPlan
from ddpilot.errors import DataError

__all__ = ["LocalBatch", "ShardedLoader", "StreamLoader", "make_loader", "make_stream_loader", "resolve_global_size"]


def make_loader(
    dataset: Any,
    *,
    rank: int,
    world_size: int,
    global_batch_size: int | None = None,
    batch_size_per_rank: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    shares: Sequence[float] | None = None,
    weights: Sequence[float] | NDArray[np.float64] | None = None,
    num_draws: int | None = None,
    replacement: bool = True,
    collate_fn: Collate | None = None,
    seed_samples: bool = True,
    num_workers: int = 0,
    **options: Any,
) -> ShardedLoader:
    """Return the loader of `rank` for a map-style `dataset`, with `len()` and `dataset[index]`. Not collective.

    Exactly one of `global_batch_size` (of all ranks together; same results at any world size) and `batch_size_per_rank`
    is required. `shuffle`, `seed`, `drop_last`, `shares`, `weights`, `num_draws`, `replacement`: as for `Plan`.

    `seed_samples`: while a sample is read, Python's, NumPy's and torch's random state is a function of (seed, epoch,
    sample index), so that augmentation does not depend on the number of ranks and workers. False: nothing is seeded,
    and the dataset's `__getitems__` is used if it has one. A dataset's `set_epoch` is called if it has one.

    `collate_fn`, `num_workers` (default 0) and `options` (`pin_memory`, `worker_init_fn`, `persistent_workers`,
    `prefetch_factor`, `timeout`, `multiprocessing_context`) are those of `torch.utils.data.DataLoader`. Raises
    `DataError`.
    """
    _refuse_no_samples(dataset, rank)
    options = {"num_workers": num_workers, **options}
    check_options(options, rank, is_stream=False)
    size = resolve_global_size(global_batch_size, batch_size_per_rank, world_size, shares, rank)
    given: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last, "shares": shares}
    drawn: dict[str, Any] = {"weights": weights, "num_draws": num_draws, "replacement": replacement}
    plan = Plan(len(dataset), size, world_size=world_size, **given, **drawn)
    reading: dict[str, Any] = {"collate": collate_fn or default_collate, "seed_samples": seed_samples}
    return ShardedLoader(dataset, plan, rank=rank, options=options, **reading)


def _refuse_no_samples(dataset: Any, rank: int) -> None:
    # torch's iterable datasets inherit a `__getitem__` that only raises.
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return
    what = "is an iterable dataset" if is_stream else "has not both `__len__` and `__getitem__`"
    fix = "For what can only be gone over, make an `IterableDataset` of it."
    if is_stream:
        fix = "For an iterable dataset, use `make_stream_loader`."
    elif isinstance(dataset, DataLoader):
        fix = "Give its dataset, or the DataLoader itself to loop.shard()."
    raise DataError("making a loader", found=f"{type(dataset).__name__} {what}", fix=fix, rank=rank)


def make_stream_loader(
    dataset: Any,
    *,
    rank: int,
    world_size: int,
    global_batch_size: int | None = None,
    batch_size_per_rank: int | None = None,
    seed: int = 0,
    drop_last: bool = False,
    shares: Sequence[float] | None = None,
    divides_itself: bool = False,
    collate_fn: Collate | None = None,
    seed_samples: bool = True,
    empty_ranks: bool = False,
    num_workers: int = 0,
    **options: Any,
) -> StreamLoader:
    """Return the loader of `rank` for an iterable `dataset`, whose `set_epoch` is called if it has one. Not collective.

    Every worker of every rank reads the whole stream and keeps its part: the batches are the same at any world size,
    provided that `iter(dataset)` yields the same samples in every process; with `seed_samples`, Python's, NumPy's and
    torch's random state is a function of (seed, epoch, position).

    `divides_itself`: the dataset reads `torch.utils.data.get_worker_info()` and yields that part only. It then sees
    rank x `num_workers` parts, so that nothing is read twice; ranks may have different numbers of batches
    (`global_count` of `LocalBatch` is None), and the order depends on the number of parts. `empty_ranks`: as for
    `Plan`; other arguments: as for `make_loader`. Raises `DataError`.
    """
    options = {"num_workers": num_workers, **options}
    check_options(options, rank, is_stream=True)
    size = resolve_global_size(global_batch_size, batch_size_per_rank, world_size, shares, rank)
    if divides_itself and drop_last:
        found = "`drop_last` with `divides_itself`: no rank knows which samples are in the last global batch"
        raise DataError("making a loader", found=found, fix="Leave `drop_last` out.", rank=rank)
    # Raises for what any plan rejects: a batch smaller than the world size, invalid shares.
    Plan(size, size, world_size=world_size, shares=shares, empty_ranks=empty_ranks)
    plan = StreamPlan(size, world_size, seed, drop_last, divides_itself, Division.of(world_size, shares))
    return StreamLoader(
        dataset,
        plan,
        rank=rank,
        collate=collate_fn or default_collate,
        seed_samples=seed_samples,
        options=options,
    )


def resolve_global_size(
    global_batch_size: int | None,
    batch_size_per_rank: int | None,
    world_size: int,
    shares: Sequence[float] | None,
    rank: int,
) -> int:
    """Return the number of samples per batch on all ranks. Raises `DataError` unless exactly one of them is given."""
    did = "making a loader"
    if not 0 <= rank < world_size:
        found = f"rank {rank} of {world_size} ranks"
        raise DataError(did, found=found, fix="Ranks count from 0 to `world_size` - 1.")
    if (global_batch_size is None) == (batch_size_per_rank is None):
        raise DataError(
            did,
            found=f"`global_batch_size={global_batch_size}` and `batch_size_per_rank={batch_size_per_rank}`",
            fix="Give one of them: samples of all ranks together, or of each.",
            rank=rank,
        )
    check_batch_size("global_batch_size", global_batch_size, rank)
    check_batch_size("batch_size_per_rank", batch_size_per_rank, rank)
    if batch_size_per_rank is None:
        return global_batch_size or 0
    if shares is not None:
        raise DataError(
            did,
            found=f"`batch_size_per_rank={batch_size_per_rank}` with unequal `shares`",
            fix="Give `global_batch_size`, of which each rank takes its share.",
            rank=rank,
        )
    return batch_size_per_rank * world_size
