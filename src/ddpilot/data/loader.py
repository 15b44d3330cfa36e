# SPDX-License-Identifier: Apache-2.0
"""Loads a rank's pieces of the global batches of a map-style dataset, with torch's own workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import default_collate

from ddpilot.data.batches import LocalBatch
from ddpilot.data.fetching import Order, PieceReader
from ddpilot.data.plan import Plan
from ddpilot.data.seeding import mix_seed
from ddpilot.errors import DataError


class ShardedLoader:
    """One rank's pieces of the global batches of a dataset; made by `make_loader` or `shard_loader`.

    Nothing in it is collective: which samples a rank takes follows from its number alone. `len()` is the number of
    global batches in an epoch, the same on every rank.
    """

    def __init__(
        self, dataset: Any, plan: Plan, *, rank: int, collate: Callable[[list[Any]], Any], seeded: bool, options: Any
    ) -> None:
        if not 0 <= rank < plan.world_size:
            raise DataError("making a loader", found=f"rank {rank} of {plan.world_size} ranks", rank=rank)
        self.dataset = dataset
        self.plan = plan
        self.rank = rank
        self._pieces = _Pieces(plan, rank)
        # A generator of its own: to start workers must not draw from the random state that the model uses.
        self._generator = torch.Generator()
        reader = PieceReader(dataset, collate, plan.seed, seeded)
        self._loader: DataLoader[Any] = DataLoader(
            reader, batch_sampler=self._pieces, collate_fn=_as_it_is, generator=self._generator, **options
        )

    def __len__(self) -> int:
        return self.plan.num_batches

    def iterate(self, epoch: int, first_batch: int = 0) -> Iterator[LocalBatch]:
        """This rank's piece of every global batch of `epoch` (0, 1, ...), from number `first_batch` on. Not collective.

        The samples before are not read. An exception of the dataset comes as it is, or as torch's text of it where a
        worker raised it.
        """
        if epoch < 0 or not 0 <= first_batch <= len(self):
            raise DataError(
                "reading an epoch",
                found=f"epoch {epoch}, batch {first_batch} of {len(self)}",
                fix="Both count from 0.",
                rank=self.rank,
            )
        self._pieces.start(epoch, first_batch)
        self._generator.manual_seed(mix_seed(self.plan.seed, epoch, self.rank))
        order = self._pieces.order
        for index, data in enumerate(self._loader, start=first_batch):
            start, stop = self.plan.piece(index, self.rank)
            yield LocalBatch(data, index, stop - start, self.plan.batch_size(index), order[start:stop])


class _Pieces(Sampler[list[Order]]):
    """torch's loader asks it, at the beginning of an epoch, which pieces to read."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._epoch = -1
        self._first_batch = 0
        self.order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def start(self, epoch: int, first_batch: int) -> None:
        """What the next `iter` is to go over."""
        if epoch != self._epoch:
            self.order = self._plan.order(epoch)
            self.order.flags.writeable = False
        self._epoch, self._first_batch = epoch, first_batch

    def __iter__(self) -> Iterator[list[Order]]:
        # Bound now: a second epoch may begin while this one is still read.
        epoch, order = self._epoch, self.order
        return ([self._piece(epoch, order, batch)] for batch in range(self._first_batch, self._plan.num_batches))

    def __len__(self) -> int:
        return self._plan.num_batches - self._first_batch

    def _piece(self, epoch: int, order: NDArray[np.int64], batch: int) -> Order:
        start, stop = self._plan.piece(batch, self._rank)
        is_empty = start == stop
        if is_empty:
            start = batch * self._plan.global_batch_size
            stop = start + 1
        repeats = self._plan.weights is not None and self._plan.replacement
        draws = list(range(start, stop)) if repeats else None
        return Order(epoch, batch, order[start:stop].tolist(), draws, is_empty)


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
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed_samples: bool = True,
    num_workers: int = 0,
    **options: Any,
) -> ShardedLoader:
    """The loader of `rank` for a map-style `dataset`, one with `len()` and `dataset[number]`. Not collective.

    One of `global_batch_size` (all ranks together; the same numbers at any world size) and `batch_size_per_rank` is
    needed. `shuffle`, `seed`, `drop_last`, `shares`, `weights`, `num_draws` and `replacement` are those of `Plan`.

    `seed_samples`: while a sample is read, Python's, numpy's and torch's random state is a function of (seed, epoch,
    sample number), so that augmentation is the same at any number of ranks and workers. False: nothing is seeded, and
    a dataset's `__getitems__` is used where it has one.

    `collate_fn`, `num_workers` (default 0) and `options` (`pin_memory`, `worker_init_fn`, `persistent_workers`,
    `prefetch_factor`, `timeout`, `multiprocessing_context`) are those of `torch.utils.data.DataLoader`. Raises
    `DataError`.
    """
    num_samples = _count_samples(dataset, rank)
    plan = Plan(
        num_samples,
        _global_size(global_batch_size, batch_size_per_rank, world_size, shares, rank),
        world_size=world_size,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        shares=shares,
        weights=weights,
        num_draws=num_draws,
        replacement=replacement,
    )
    options = {"num_workers": num_workers, **options}
    collate = collate_fn or default_collate
    return ShardedLoader(dataset, plan, rank=rank, collate=collate, seeded=seed_samples, options=options)


def _global_size(
    global_batch_size: int | None,
    batch_size_per_rank: int | None,
    world_size: int,
    shares: Sequence[float] | None,
    rank: int,
) -> int:
    did = "making a loader"
    if (global_batch_size is None) == (batch_size_per_rank is None):
        raise DataError(
            did,
            found=f"`global_batch_size={global_batch_size}` and `batch_size_per_rank={batch_size_per_rank}`",
            fix="Give one of them: samples of all ranks together, or of each.",
            rank=rank,
        )
    if global_batch_size is not None:
        return global_batch_size
    if shares is not None:
        raise DataError(
            did,
            found=f"`batch_size_per_rank={batch_size_per_rank}` with unequal `shares`",
            fix="Give `global_batch_size`, of which each rank takes its share.",
            rank=rank,
        )
    return (batch_size_per_rank or 0) * world_size


def _count_samples(dataset: Any, rank: int) -> int:
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return len(dataset)
    raise DataError(
        "making a loader",
        found=f"{type(dataset).__name__} has no `__len__` and `__getitem__`",
        fix="Give a map-style dataset.",
        rank=rank,
    )


def _as_it_is(data: Any) -> Any:
    return data
