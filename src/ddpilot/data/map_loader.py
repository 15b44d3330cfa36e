# SPDX-License-Identifier: Apache-2.0
"""`MapLoader`: loads a rank's pieces of the global batches of a map-style dataset, with torch's workers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from ddpilot.data.batches import LocalBatch, render_loader
from ddpilot.data.dataloader_spec import BatchSamplerOrder
from ddpilot.data.global_batches import Epoch, Plan
from ddpilot.data.options import Collate
from ddpilot.data.sample_seeds import mix_seed
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
