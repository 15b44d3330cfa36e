# SPDX-License-Identifier: Apache-2.0
"""Make a rank's loader for a map-style dataset, an iterable one, one of shards, or a torch DataLoader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, default_collate

from ddpilot.data.dataloader_spec import (
    BatchSamplerOrder,
    DataLoaderSpec,
    read_loader,
    read_seed,
    read_worker_options,
    refuse_other_loaders,
    refuse_whole_batches,
)
from ddpilot.data.global_batches import Division, Epoch, Plan
from ddpilot.data.local_batch import LocalBatch, mix_seed, render_loader
from ddpilot.data.options import (
    WORKER_OPTIONS,
    Collate,
    LoaderOptions,
    check_batch_size,
    read_data_loader_options,
    read_options,
)
from ddpilot.data.shards.files import count_shards
from ddpilot.data.shards.loader import ShardLoader
from ddpilot.data.shards.order import ShardPlan
from ddpilot.data.stream_loader import StreamLoader, StreamPlan
from ddpilot.data.workers import Failure, Order, PieceReader, Workers
from ddpilot.errors import DataError


class MapLoader:
    """A rank's pieces of the global batches of a dataset; created by `make_loader` or `prepare_data_loader`.

    Nothing in it is collective: the samples of a rank follow from its number. `len()` is the number of batches in an
    epoch. `plan`: a `Plan`, or the user's own batches. `is_joint`: False if every rank has the same number of batches
    and knows their global sizes. If True (batches that a user's sampler has already divided), `iterate` is endless.
    """

    def __init__(
        self,
        dataset: Any,
        plan: Plan | BatchSamplerOrder,
        *,
        rank: int,
        collate: Collate,
        seed_samples: bool = True,
        is_joint: bool = False,
        options: Mapping[str, Any],
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.rank = rank
        self.is_joint = is_joint
        self._piece_rank = 0 if is_joint else rank  # batches that are already divided have one piece
        self._reader = PieceReader(dataset, collate, plan.seed, seed_samples)
        self._workers = Workers(self._reader, rank, options)
        self._epoch: tuple[int, Epoch] | None = None

    def __repr__(self) -> str:
        return render_loader(self)

    def __len__(self) -> int:
        return self.plan.num_batches

    def iterate(self, epoch: int, first_batch: int = 0) -> Iterator[LocalBatch]:
        """Yield this rank's piece of every global batch of `epoch` (0, 1, ...) from `first_batch` on. Not collective.

        Samples of earlier batches are not read. If `is_joint`, ranks may have different numbers of batches: a rank
        without further batches yields batches with `count` 0 until the iterator is closed; the ranks stop together when
        none has a sample. Raises `DataError`, with the original exception as its cause, if the dataset or `collate_fn`
        raises.
        """
        division = self._divide(epoch)
        if not 0 <= first_batch <= division.num_batches:
            found = f"an epoch of {division.num_batches} batches"
            raise DataError(
                f"starting at batch {first_batch}", found=found, fix="Batches count from 0.", rank=self.rank
            )
        batches = range(first_batch, division.num_batches)
        for index, data in zip(batches, self._load(epoch, division, batches), strict=True):
            start, stop = division.piece(index, self._piece_rank)
            ids = division.order[start:stop]
            yield LocalBatch(data, index, stop - start, None if self.is_joint else division.batch_size(index), ids)
        if self.is_joint:
            yield from self._yield_empty(epoch, division)

    def _divide(self, epoch: int) -> Epoch:
        if epoch < 0:
            raise DataError(
                "reading an epoch", found=f"its number is {epoch}", fix="Epochs count from 0.", rank=self.rank
            )
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self.plan.epoch(epoch)
        return self._epoch[1]

    def _load(self, epoch: int, division: Epoch, batches: range) -> Iterator[Any]:
        if batches:  # otherwise workers would be started for nothing
            has_repeats = self.plan.has_repeats
            orders = ([self._order(epoch, division, batch, has_repeats)] for batch in batches)
            return self._workers.read(orders, mix_seed(self.plan.seed, epoch, self.rank))
        return iter(())

    def _order(self, epoch: int, division: Epoch, batch: int, has_repeats: bool) -> Order:
        start, stop = division.piece(batch, self._piece_rank)
        is_empty = start == stop
        if is_empty:
            # An empty batch can be made from any sample of the batch.
            start = int(division.starts[batch])
            stop = start + 1
        draws = list(range(start, stop)) if has_repeats else None
        return Order(epoch, batch, division.order[start:stop], draws, is_empty)

    def _yield_empty(self, epoch: int, division: Epoch) -> Iterator[LocalBatch]:
        data = None
        if len(division.order):
            data = self._reader.__getitems__([Order(epoch, 0, division.order[:1], None, True)])
            if isinstance(data, Failure):
                data.throw(self.rank)
        index = division.num_batches
        while True:
            yield LocalBatch(copy.deepcopy(data), index, 0, None, division.order[:0])
            index += 1


def make_loader(dataset: Any, *, rank: int, world_size: int, **options: Any) -> MapLoader:
    """Return the loader of `rank` for a map-style `dataset`, with `len()` and `dataset[index]`. Not collective.

    `options`: those of `LoaderOptions`, of which exactly one batch size is required. A dataset's `set_epoch` is called
    if it has one. Raises `DataError`.
    """
    _refuse_no_samples(dataset, rank)
    given = read_options(options, rank, is_stream=False)
    plan = Plan(
        len(dataset),
        resolve_global_size(given.global_batch_size, given.batch_size_per_rank, world_size, given.batch_split, rank),
        world_size=world_size,
        seed=given.seed or 0,
        shuffle=bool(given.shuffle),
        drop_last=given.drop_last,
        batch_split=given.batch_split,
        weights=given.weights,
        num_draws=given.num_draws,
        replacement=given.replacement,
    )
    return MapLoader(dataset, plan, rank=rank, **_reading(given, options))


def _reading(given: LoaderOptions, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a loader that say how it reads samples, from `options` and what they were parsed to."""
    # torch's DataLoader gets those options alone that were given, since its defaults depend on each other.
    workers = {name: value for name, value in options.items() if name in WORKER_OPTIONS}
    return {"collate": given.collate_fn or default_collate, "seed_samples": given.seed_samples, "options": workers}


def _refuse_no_samples(dataset: Any, rank: int) -> None:
    # torch's iterable datasets inherit a `__getitem__` that only raises.
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return
    what = "is an iterable dataset" if is_stream else "does not have both `__len__` and `__getitem__`"
    fix = "Wrap data that can only be iterated in an `IterableDataset`."
    if is_stream:
        fix = "For an iterable dataset, use `make_stream_loader`."
    elif isinstance(dataset, DataLoader):
        fix = "Give its dataset, or the DataLoader itself to loop.prepare_data_loader()."
    raise DataError("making a loader", found=f"{type(dataset).__name__} {what}", fix=fix, rank=rank)


def make_stream_loader(dataset: Any, *, rank: int, world_size: int, **options: Any) -> StreamLoader:
    """Return the loader of `rank` for an iterable `dataset`, whose `set_epoch` is called if it has one. Not collective.

    `options`: those of `LoaderOptions` but `shuffle` and `weights`. The batches are the same at any world size, unless
    the dataset `divides_itself`: `global_count` of `LocalBatch` is then None. Raises `DataError`.
    """
    given = read_options(options, rank, is_stream=True)
    size, division = _divide(given, world_size, rank)
    if given.divides_itself and given.drop_last:
        found = "`drop_last` with `divides_itself`: the ranks do not know which samples are in the last global batch"
        raise DataError("making a loader", found=found, fix="Leave `drop_last` out.", rank=rank)
    plan = StreamPlan(size, world_size, given.seed or 0, given.drop_last, given.divides_itself, division)
    return StreamLoader(dataset, plan, rank=rank, **_reading(given, options))


def make_shard_loader(dataset: Any, *, rank: int, world_size: int, **options: Any) -> ShardLoader:
    """Return the loader of `rank` for a `dataset` of shards, with `num_shards` and `open(shard, skip=...)`.

    Not collective. `options`: those of `LoaderOptions` but `weights` and `divides_itself`. The batches are the same at
    any world size. Raises `DataError`.
    """
    given = read_options(options, rank, is_sharded=True)
    size, division = _divide(given, world_size, rank)
    check_batch_size("num_lanes", given.num_lanes, rank)
    check_batch_size("shuffle_buffer", given.shuffle_buffer, rank)
    num_shards, lengths = count_shards(dataset, rank)
    plan = ShardPlan(
        num_shards=num_shards,
        lengths=lengths,
        global_batch_size=size,
        world_size=world_size,
        division=division,
        seed=given.seed or 0,
        shuffle=bool(given.shuffle),
        shuffle_buffer=given.shuffle_buffer,
        num_lanes=given.num_lanes,
        drop_last=given.drop_last,
    )
    return ShardLoader(dataset, plan, rank=rank, **_reading(given, options))


def _divide(given: LoaderOptions, world_size: int, rank: int) -> tuple[int, Division]:
    """Return the global batch size of a stream and its division among ranks; raises for what any `Plan` rejects."""
    size = resolve_global_size(given.global_batch_size, given.batch_size_per_rank, world_size, given.batch_split, rank)
    plan = Plan(size, size, world_size=world_size, batch_split=given.batch_split, empty_ranks=given.empty_ranks)
    return size, plan.division


def resolve_global_size(
    global_batch_size: int | None,
    batch_size_per_rank: int | None,
    world_size: int,
    batch_split: Sequence[float] | None,
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
    if batch_split is not None:
        raise DataError(
            did,
            found=f"`batch_size_per_rank={batch_size_per_rank}` with unequal `batch_split`",
            fix="Give `global_batch_size`, of which each rank takes its share.",
            rank=rank,
        )
    return batch_size_per_rank * world_size


def prepare_data_loader(
    loader: DataLoader[Any], *, rank: int, world_size: int, say: Callable[[str], None] | None = None, **options: Any
) -> MapLoader | StreamLoader:
    """Return the loader of `rank` that does what the torch `loader` does in one process. Not collective.

    Its batch size is the global one, of all ranks together; with `batch_size_per_rank=True` that of each rank.
    `drop_last`, `collate_fn` and worker options are kept. With torch's samplers, the order is drawn from the seed (the
    initial seed of the loader's generator if it has one, otherwise `seed`); other samplers define the order if they
    yield the same one each time they are iterated in an epoch, and a `batch_sampler` likewise defines the global
    batches. A DistributedSampler is replaced, and its loader's batch size taken as that of a rank. Other samplers that
    divide samples among ranks are used unchanged; `is_joint` is then True.

    `options`: `batch_size_per_rank`, and of `LoaderOptions` also `batch_split`, `seed`, `divides_itself`,
    `seed_samples` and `empty_ranks`. `say` is called once, on rank 0 of several ranks, with the resulting batch sizes.
    Raises `DataError` if the loader cannot be divided exactly, and for other `options`.
    """
    refuse_other_loaders(loader)
    given = read_data_loader_options(options, rank)
    refuse_whole_batches(loader)
    report = say if say is not None and rank == 0 and world_size > 1 else lambda _: None
    job = _Job(rank, world_size, given, report)
    if isinstance(loader.dataset, IterableDataset):
        return _shard_stream(loader, job)
    spec = read_loader(loader, given.seed or 0)
    plan = _plan_samples(loader, job, spec) if spec.batches is None else _plan_batches(job, spec)
    return MapLoader(
        loader.dataset,
        plan,
        rank=rank,
        collate=loader.collate_fn,
        seed_samples=given.seed_samples,
        is_joint=spec.batches is not None and spec.are_divided,
        options=read_worker_options(loader),
    )


class _Job(NamedTuple):
    """The arguments common to all kinds of loaders."""

    rank: int
    world_size: int
    options: LoaderOptions
    report: Callable[[str], None]

    def global_size(self, batch_size: int, is_per_rank: bool) -> int:
        """Return the global batch size for the loader's `batch_size`."""
        of_all, of_each = (None, batch_size) if is_per_rank else (batch_size, None)
        return resolve_global_size(of_all, of_each, self.world_size, self.options.batch_split, self.rank)

    def report_size(self, size: int, batch_size: int, is_per_rank: bool) -> None:
        """Report the loader's batch size, per rank and global, once it is known to be divisible."""
        counts = sorted({*Division.of(self.world_size, self.options.batch_split).sizes(size)})
        each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        meaning = "each rank's" if is_per_rank else "that of all ranks together"
        self.report(
            f"The loader's batch size of {batch_size} is taken as {meaning}: a global batch has {size} samples, "
            f"{each} for each of {self.world_size} ranks."
        )


def _shard_stream(loader: DataLoader[Any], job: _Job) -> StreamLoader:
    given, batch_size = job.options, loader.batch_size or 0
    is_per_rank = bool(given.batch_size_per_rank)
    size = job.global_size(batch_size, is_per_rank)
    made = make_stream_loader(
        loader.dataset,
        rank=job.rank,
        world_size=job.world_size,
        global_batch_size=size,
        seed=read_seed(loader, given.seed or 0),
        drop_last=loader.drop_last,
        batch_split=given.batch_split,
        divides_itself=given.divides_itself,
        collate_fn=loader.collate_fn,
        seed_samples=given.seed_samples,
        empty_ranks=given.empty_ranks,
        **read_worker_options(loader),
    )
    job.report_size(size, batch_size, is_per_rank)
    return made


def _plan_samples(loader: DataLoader[Any], job: _Job, spec: DataLoaderSpec) -> Plan:
    is_per_rank = bool(job.options.batch_size_per_rank) or spec.are_divided
    size = job.global_size(spec.batch_size, is_per_rank)
    plan = Plan(
        len(loader.dataset),  # type: ignore[arg-type]
        size,
        world_size=job.world_size,
        seed=spec.seed,
        drop_last=spec.drop_last,
        batch_split=job.options.batch_split,
        empty_ranks=job.options.empty_ranks,
        **spec.plan,
    )
    job.report_size(size, spec.batch_size, is_per_rank)
    return plan


def _plan_batches(job: _Job, spec: DataLoaderSpec) -> BatchSamplerOrder:
    if job.options.batch_split is not None:
        found = f"`batch_split={list(job.options.batch_split)}` with batches of its own sampler"
        raise DataError("preparing a DataLoader", found=found, fix="Leave `batch_split` out.", rank=job.rank)
    division = f"each taken as one of all {job.world_size} ranks together"
    if spec.are_divided:
        division = "which already divides among ranks: each rank takes its own batches unchanged"
    job.report(f"The loader's batches are those of its {type(spec.batches).__name__}, {division}.")
    return BatchSamplerOrder(spec.batches, world_size=job.world_size, seed=spec.seed, are_divided=spec.are_divided)
