# SPDX-License-Identifier: Apache-2.0
"""`ShardLoader`: loads a rank's pieces of the global batches of a dataset of shards, with torch's workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from ddpilot.data.batches import LocalBatch, render_loader
from ddpilot.data.options import Collate
from ddpilot.data.sample_seeds import mix_seed
from ddpilot.data.shards.order import ShardOrder, ShardPlan, Take
from ddpilot.data.shards.reader import ShardReader, ShardRequest
from ddpilot.data.workers import Workers
from ddpilot.errors import DataError

MergeLengths = Callable[[dict[int, int]], Mapping[int, int]]


class ShardLoader:
    """A rank's pieces of the global batches of a dataset of shards; created by `make_shard_loader`.

    Each shard is open in one worker of one rank, unless there are fewer shards than workers. `is_joint`: True if the
    length of a shard is unknown; the ranks then have to tell each other which shards have ended. `len()` is the number
    of global batches if the number of samples is known; otherwise it raises `TypeError`.
    """

    def __init__(
        self,
        dataset: Any,
        plan: ShardPlan,
        *,
        rank: int,
        collate: Collate,
        seed_samples: bool = True,
        options: Mapping[str, Any],
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.rank = rank
        self.is_joint = plan.num_samples is None
        self._num_passes = 0
        draws = collate is not default_collate or not getattr(dataset, "is_plain", False)
        reader = ShardReader(dataset, plan, collate=collate, seeded=seed_samples and draws)
        self._workers = Workers(reader, rank, options)

    def __repr__(self) -> str:
        return render_loader(self)

    def __len__(self) -> int:
        num_samples, size = self.plan.num_samples, self.plan.global_batch_size
        if num_samples is None:
            if not hasattr(self.dataset, "__len__"):
                raise TypeError(f"the number of batches of {type(self.dataset).__name__} is unknown until it was read")
            num_samples = len(self.dataset)
        return num_samples // size if self.plan.drop_last else -(-num_samples // size)

    def iterate(
        self, epoch: int, first_batch: int = 0, state: Any = None, merge: MergeLengths | None = None
    ) -> Iterator[LocalBatch]:
        """Yield this rank's piece of every batch of `epoch` (0, 1, ...), starting at `first_batch`.

        `state`: the `stream_state` of batch `first_batch` - 1; without it, and with shards of unknown length, earlier
        batches are read and dropped. `merge`: called with the lengths of the shards that this rank has read to their
        end, after each batch until all lengths are known; returns those of all ranks. Collective if it is. Raises
        `DataError`, with the original exception as its cause, if the dataset or `collate_fn` raises.
        """
        self._check(epoch, first_batch, merge)
        order = ShardOrder(self.plan, epoch, state)
        if state is None and order.is_known:
            while order.batch < first_batch and order.take():
                pass
        course = _Course(order)
        self._num_passes += 1
        requests = self._request(self._num_passes, epoch, course)
        pieces: Any = self._workers.read(requests, mix_seed(self.plan.seed, epoch, self.rank))
        found: dict[int, int] = {}
        try:
            for piece in pieces:
                if piece is None:
                    continue
                found |= piece.lengths
                if piece.attempt != course.attempt:
                    continue
                if not course.order.is_known:
                    course.order.learn(found if merge is None else merge(found))
                    found = {}
                takes = course.accept()
                if takes and piece.data is None:
                    raise self._not_repeated(epoch, course.order.batch - 1)
                if takes and course.order.batch > first_batch:
                    yield self._as_batch(piece.data, takes, course.order)
        finally:
            pieces.close()

    def _not_repeated(self, epoch: int, batch: int) -> DataError:
        return DataError(
            f"reading batch {batch} of epoch {epoch}",
            found="a shard has fewer samples than when it was opened before, or `collate_fn` returned None",
            fix="Let `open` yield the same records each time, and `collate_fn` return a batch.",
            rank=self.rank,
        )

    def _check(self, epoch: int, first_batch: int, merge: MergeLengths | None) -> None:
        did = "reading shards"
        if epoch < 0 or first_batch < 0:
            raise DataError(did, found=f"epoch {epoch}, batch {first_batch}", fix="Both count from 0.", rank=self.rank)
        if self.is_joint and merge is None and self.plan.world_size > 1:
            found = f"the lengths of shards are unknown, and {self.plan.world_size} ranks do not exchange them"
            raise DataError(
                did, found=found, fix="Read it by loop.batches, or define `num_samples(shard)`.", rank=self.rank
            )

    def _as_batch(self, data: Any, takes: tuple[Take, ...], order: ShardOrder) -> LocalBatch:
        before, own = self.plan.piece(takes, self.rank)
        count, index = sum(take.num for take in own), order.batch - 1
        first = index * self.plan.global_batch_size + before
        ids = np.arange(first, first + count, dtype=np.int64)
        return LocalBatch(data, index, count, sum(take.num for take in takes), ids, order.state())

    def _request(self, number: int, epoch: int, course: _Course) -> Iterator[list[ShardRequest | None]]:
        """Yield a request for each batch, so that torch's DataLoader gives a set of lanes always to the same worker.

        It hands requests to workers in turn: None is added to reach the worker of a batch.
        """
        num_workers = max(1, self._workers.loader.num_workers)
        attempt, sent = -1, 0
        while True:
            if attempt != course.attempt:
                attempt, order = course.attempt, course.order.copy()
            sent += 1
            if (sent - 1 - order.batch % self.plan.num_turns) % num_workers:
                yield [None]
                continue
            batch, is_final = order.batch, order.is_known
            takes = order.take()
            if not takes:  # only if all lengths are known: otherwise some lane may go on
                return
            _, own = self.plan.piece(takes, self.rank)
            read = tuple(own) or (takes[0]._replace(num=1),)
            course.issued.append(takes)
            starts = tuple(course.order.find_lane_start(take.lane) for take in read)
            yield [ShardRequest(number, attempt, epoch, batch, read, starts, is_final, not own)]


class _Course:
    """The position of a pass, and the batches that were requested from there on."""

    def __init__(self, order: ShardOrder) -> None:
        self.order = order
        self.attempt = 0
        self.issued: deque[tuple[Take, ...]] = deque()

    def accept(self) -> tuple[Take, ...]:
        """Return the takes of the next batch that was requested, and advance.

        Return () if a lane has ended since, so that this batch and those after it have to be requested again.
        """
        ahead = self.order.copy()
        takes = ahead.take()
        if takes == self.issued.popleft():
            self.order = ahead
            return takes
        self.attempt += 1
        self.issued.clear()
        return ()
