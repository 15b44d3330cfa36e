# SPDX-License-Identifier: Apache-2.0
"""`StreamLoader`: loads a rank's pieces of the global batches of an iterable dataset, with torch's workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from ddpilot.data.batches import LocalBatch
from ddpilot.data.fetching import Collate, Failure, draws_randomly
from ddpilot.data.sample_seeds import mix_seed
from ddpilot.data.streams import StreamOrder, StreamPiece, StreamPlan, StreamReader
from ddpilot.data.workers import Workers
from ddpilot.errors import DataError


class StreamLoader:
    """A rank's pieces of the global batches of an iterable dataset; created by `make_stream_loader` or `shard_loader`.

    Nothing in it is collective. `is_joint`: False if every worker of every rank reads the same stream; then the batches
    are the same at any world size, and all ranks see its end. True if the dataset divides itself; then `iterate` is
    endless. `len()` is the number of global batches if the dataset has a length and does not divide itself; otherwise
    it raises `TypeError`.
    """

    def __init__(
        self,
        dataset: Any,
        plan: StreamPlan,
        *,
        rank: int,
        collate: Collate,
        seed_samples: bool = True,
        options: Mapping[str, Any],
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.rank = rank
        self.is_joint = plan.divides_itself
        self._orders = _StreamOrders()
        seeded = seed_samples and draws_randomly(dataset, collate)
        # Without seeds, random draws in a sample may differ between ranks.
        compared = seed_samples and plan.world_size > 1 and not plan.divides_itself
        reader = StreamReader(dataset, plan, rank=rank, collate=collate, seeded=seeded, compared=compared)
        self._workers = Workers(reader, self._orders, rank, options)

    def __len__(self) -> int:
        if self.plan.divides_itself or not hasattr(self.dataset, "__len__"):
            raise TypeError(f"how many batches {type(self.dataset).__name__} has is known when they have been read")
        num_samples, size = len(self.dataset), self.plan.global_batch_size
        return num_samples // size if self.plan.drop_last else -(-num_samples // size)

    def iterate(self, epoch: int, first_batch: int = 0, state: Any = None) -> Iterator[LocalBatch]:
        """Yield this rank's piece of every batch of `epoch` (0, 1, ...), starting at `first_batch`. Not collective.

        `state`: the `stream_state` of batch `first_batch` - 1; without it, the stream is read from its start and
        earlier samples are skipped. If `is_joint`, ranks have different numbers of batches: a rank without further
        batches yields batches with `count` 0 until the iterator is closed, with `data` None if it never had one; the
        ranks stop together when none has a sample. Raises `DataError`, with the original exception as its cause, if the
        dataset or `collate_fn` raises.
        """
        if epoch < 0 or first_batch < 0:
            found = f"epoch {epoch}, batch {first_batch}"
            raise DataError("reading a stream", found=found, fix="Both count from 0.", rank=self.rank)
        if self.is_joint:
            yield from self._read_parts(epoch, first_batch)
            return
        for index, piece in enumerate(self._load(epoch, first_batch, state), start=first_batch):
            if not piece.global_count:
                return
            yield _as_batch(piece, index, piece.global_count, piece.start)

    def _read_parts(self, epoch: int, first_batch: int) -> Iterator[LocalBatch]:
        """Yield the batches of this rank's workers, alternating between workers, then empty batches without end."""
        num_parts = max(1, self._workers.loader.num_workers)
        index = 0
        ended: dict[int, Any] = {}
        for piece in self._load(epoch, 0, None):
            if not piece.num_samples:
                ended[piece.part] = piece.data
                if len(ended) == num_parts:
                    break
                continue
            if index >= first_batch:
                yield _as_batch(piece, index, None, -1)
            index += 1
        data = next((data for data in ended.values() if data is not None), None)
        for number in count(max(index, first_batch)):
            yield LocalBatch(data, number, 0, None, np.empty(0, dtype=np.int64))

    def _load(self, epoch: int, first_batch: int, state: Any) -> Iterator[StreamPiece]:
        self._orders.begin_pass(epoch, first_batch, state)
        for piece in self._workers.read(mix_seed(self.plan.seed, epoch, self.rank)):
            if isinstance(piece, Failure):
                piece.throw(self.rank)
            yield piece


class _StreamOrders(Sampler[list[StreamOrder]]):
    """Batch sampler that torch's DataLoader iterates when reading starts; endless, as the stream determines the end."""

    def __init__(self) -> None:
        self._pass_number = 0
        self._first: tuple[int, int, Any] = (0, 0, None)

    def begin_pass(self, epoch: int, first_batch: int, state: Any) -> None:
        """Set what the next iteration starts with."""
        self._pass_number += 1
        self._first = (epoch, first_batch, state)

    def __iter__(self) -> Iterator[list[StreamOrder]]:
        number, (epoch, first_batch, state) = self._pass_number, self._first
        return ([StreamOrder(number, epoch, batch, first_batch, state)] for batch in count(first_batch))


def _as_batch(piece: StreamPiece, index: int, global_count: int | None, start: int) -> LocalBatch:
    ids = np.arange(piece.num_samples, dtype=np.int64) + start if start >= 0 else np.full(piece.num_samples, -1)
    return LocalBatch(piece.data, index, piece.num_samples, global_count, ids, piece.state, piece.first_seen)
