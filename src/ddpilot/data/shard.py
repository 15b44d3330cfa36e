# SPDX-License-Identifier: Apache-2.0
"""Make a rank's loader from a user's torch DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from ddpilot.data.dataloader_spec import (
    Reading,
    read_loader,
    read_options,
    read_seed,
    refuse_other_loaders,
    refuse_whole_batches,
)
from ddpilot.data.division import Division
from ddpilot.data.given import GivenBatches
from ddpilot.data.loaders import make_stream_loader, resolve_global_size
from ddpilot.data.map_loader import ShardedLoader
from ddpilot.data.options import check_shard_options
from ddpilot.data.plan import Plan
from ddpilot.data.stream_loader import StreamLoader
from ddpilot.errors import DataError


def shard_loader(
    loader: DataLoader[Any],
    *,
    rank: int,
    world_size: int,
    batch_size_per_rank: bool = False,
    seed: int = 0,
    shares: Sequence[float] | None = None,
    divides_itself: bool = False,
    seed_samples: bool = True,
    empty_ranks: bool = False,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> ShardedLoader | StreamLoader:
    """Return the loader of `rank` that does what the torch `loader` does in one process. Not collective.

    Its batch size is the global one, of all ranks together; with `batch_size_per_rank` that of each rank. `drop_last`,
    `collate_fn` and worker options are kept. With torch's samplers, the order is drawn from the seed (the initial seed
    of the loader's generator if it has one, otherwise `seed`); other samplers define the order if they yield the same
    one each time they are iterated in an epoch, and a `batch_sampler` likewise defines the global batches. A
    DistributedSampler is replaced, and its loader's batch size taken as that of a rank. Other samplers that divide
    samples among ranks are used unchanged; `is_joint` is then True.

    `say` is called once, on rank 0 of several ranks, with the resulting batch sizes. `divides_itself`, `seed_samples`:
    as for `make_stream_loader`; `empty_ranks`: as for `Plan`. Raises `DataError` if the loader cannot be divided
    exactly, and for other `options`.
    """
    refuse_other_loaders(loader)
    check_shard_options(options, rank)
    refuse_whole_batches(loader)
    is_heard = say is not None and rank == 0 and world_size > 1
    said = say if say and is_heard else _say_nothing
    job = _Job(rank, world_size, shares, batch_size_per_rank, seed_samples, empty_ranks, said)
    if isinstance(loader.dataset, IterableDataset):
        return _shard_stream(loader, job, read_seed(loader, seed), divides_itself)
    reading = read_loader(loader, seed)
    return _shard_samples(loader, job, reading) if reading.batches is None else _shard_batches(loader, job, reading)


class _Job(NamedTuple):
    """The arguments common to all kinds of loaders."""

    rank: int
    world_size: int
    shares: Sequence[float] | None
    is_per_rank: bool
    seed_samples: bool
    empty_ranks: bool
    say: Callable[[str], None]


def _shard_stream(loader: DataLoader[Any], job: _Job, seed: int, divides_itself: bool) -> StreamLoader:
    batch_size = loader.batch_size or 0
    size = _size(batch_size, job, job.is_per_rank)
    made = make_stream_loader(
        loader.dataset,
        rank=job.rank,
        world_size=job.world_size,
        global_batch_size=size,
        seed=seed,
        drop_last=loader.drop_last,
        shares=job.shares,
        divides_itself=divides_itself,
        collate_fn=loader.collate_fn,
        seed_samples=job.seed_samples,
        empty_ranks=job.empty_ranks,
        **read_options(loader),
    )
    _say_size(size, batch_size, job, job.is_per_rank)
    return made


def _shard_samples(loader: DataLoader[Any], job: _Job, reading: Reading) -> ShardedLoader:
    dataset: Any = loader.dataset
    is_per_rank = job.is_per_rank or reading.are_divided
    size = _size(reading.batch_size, job, is_per_rank)
    plan = Plan(
        len(dataset),
        size,
        world_size=job.world_size,
        seed=reading.seed,
        drop_last=reading.drop_last,
        shares=job.shares,
        empty_ranks=job.empty_ranks,
        **reading.plan,
    )
    _say_size(size, reading.batch_size, job, is_per_rank)
    return _made(loader, job, plan, is_joint=False)


def _shard_batches(loader: DataLoader[Any], job: _Job, reading: Reading) -> ShardedLoader:
    if job.shares is not None:
        found = f"`shares={list(job.shares)}` with batches of its own sampler"
        raise DataError("sharding a DataLoader", found=found, fix="Leave `shares` out.", rank=job.rank)
    whose = f"each taken as one of all {job.world_size} ranks together"
    if reading.are_divided:
        whose = "which knows of ranks: each rank takes its own as they are"
    job.say(f"The loader's batches are those of its {type(reading.batches).__name__}, {whose}.")
    plan = GivenBatches(reading.batches, world_size=job.world_size, seed=reading.seed, are_divided=reading.are_divided)
    return _made(loader, job, plan, is_joint=reading.are_divided)


def _made(loader: DataLoader[Any], job: _Job, plan: Plan | GivenBatches, *, is_joint: bool) -> ShardedLoader:
    return ShardedLoader(
        loader.dataset,
        plan,
        rank=job.rank,
        collate=loader.collate_fn,
        seed_samples=job.seed_samples,
        is_joint=is_joint,
        options=read_options(loader),
    )


def _size(batch_size: int, job: _Job, is_per_rank: bool) -> int:
    """Return the global batch size."""
    given, other = (None, batch_size) if is_per_rank else (batch_size, None)
    return resolve_global_size(given, other, job.world_size, job.shares, job.rank)


def _say_size(size: int, batch_size: int, job: _Job, is_per_rank: bool) -> None:
    """Report the loader's batch size, per rank and global, once it is known to be divisible."""
    pieces = [Division.of(job.world_size, job.shares).piece(size, rank) for rank in range(job.world_size)]
    counts = sorted({stop - start for start, stop in pieces})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    whose = "each rank's" if is_per_rank else "that of all ranks together"
    job.say(
        f"The loader's batch size of {batch_size} is taken as {whose}: a global batch has {size} samples, "
        f"{each} for each of {job.world_size} ranks."
    )


def _say_nothing(sentence: str) -> None:
    del sentence
