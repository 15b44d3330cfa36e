# SPDX-License-Identifier: Apache-2.0
"""`ShardLoader`: one rank's batches of a dataset of shards, and how a rank or worker reads its shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, default_collate

from ddpilot.data.global_batches import draw_permutation
from ddpilot.data.local_batch import LocalBatch, mix_seed, random_apart, render_loader, seed_random
from ddpilot.data.nested import without_rows
from ddpilot.data.options import Collate
from ddpilot.data.shards.files import describe_shard
from ddpilot.data.shards.order import LaneStart, ShardOrder, ShardPlan, Take
from ddpilot.data.workers import Failure, Workers, catch_failure
from ddpilot.errors import DataError


class ShardRequest(NamedTuple):
    """One batch to read."""

    pass_number: int
    """A different one closes all lanes."""
    attempt: int
    """Is returned with the piece: batches are requested again after the end of a lane was found."""
    epoch: int
    batch: int
    takes: tuple[Take, ...]
    starts: tuple[LaneStart, ...]
    """For each take, the position at which a lane is opened if it is closed: before the first batch not yet yielded."""
    is_final: bool
    """True if no earlier batch can be requested again. Otherwise the records from `starts` on are kept."""
    is_empty: bool
    """True if the rank has no sample of the batch; `takes` is then one sample, of which an empty batch is made."""


class ShardPiece(NamedTuple):
    """A rank's part of a batch that was read."""

    data: Any
    """The samples, collated; None if the shards have fewer samples than requested."""
    lengths: dict[int, int]
    """Number of samples of each shard whose end was reached since the previous batch."""
    attempt: int


_READING, _DECODING, _COLLATING = 2, 3, 1


class ShardReader(Dataset[Any]):
    """A dataset of whole pieces: `reader.__getitems__([request])` is a `ShardPiece` or a `Failure`.

    It keeps lanes open between calls. A request of None is answered by None.
    """

    def __init__(self, dataset: Any, plan: ShardPlan, *, collate: Collate, seeded: bool) -> None:
        self._dataset = dataset
        self._plan = plan
        self._collate = collate
        self._seeded = seeded
        self._decode: Callable[[Any], Any] | None = getattr(dataset, "decode", None)
        self._pass_number = -1
        self._epoch = -1
        self._shards: list[list[int]] = []
        self._lanes: dict[int, _Lane] = {}
        self._lengths: dict[int, int] = {}
        self._doing: object = ""
        """For errors: what is being done, as text or a `_Place`."""

    def __getitems__(self, requests: Sequence[ShardRequest | None]) -> ShardPiece | Failure | None:
        (request,) = requests
        if request is None:
            return None
        try:
            with random_apart() if self._seeded else nullcontext():
                self._start(request)
                return self._read(request)
        except Exception as error:  # noqa: BLE001 - the rank raises it, with its number
            self._close()
            doing = f"{self._doing} (batch {request.batch} of epoch {request.epoch})"
            fix = "Call `collate_fn` with these samples, without workers."
            if isinstance(self._doing, _Place):
                fix = f"Read that shard without a loader: `list(dataset.open({self._doing.shard}))`."
            return catch_failure(doing, fix, error)

    def _start(self, request: ShardRequest) -> None:
        if request.pass_number == self._pass_number:
            return
        self._close()
        self._pass_number = request.pass_number
        self._doing = "beginning an epoch of shards"
        if request.epoch != self._epoch:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(request.epoch)
            self._shards = self._plan.deal_shards(request.epoch)
        self._epoch = request.epoch

    def _close(self) -> None:
        """Close the open shards."""
        for lane in self._lanes.values():
            lane.records.close()
        self._lanes, self._lengths = {}, {}

    def _read(self, request: ShardRequest) -> ShardPiece:
        samples: list[Any] = []
        for take, start in zip(request.takes, request.starts, strict=True):
            samples += self._take(take, start, request.is_final)
        is_short = len(samples) < sum(take.num for take in request.takes)
        lengths, self._lengths = self._lengths, {}
        if is_short:  # the batch will be requested again, with other lanes
            return ShardPiece(None, lengths, request.attempt)
        self._doing = f"collating {len(samples)} samples"
        self._seed(request.batch, _COLLATING)
        data = self._collate(samples)
        if request.is_empty:
            data = without_rows(data, self._collate([*samples, *samples]))
        return ShardPiece(data, lengths, request.attempt)

    def _take(self, take: Take, start: LaneStart, is_final: bool) -> Iterator[Any]:
        lane = self._lanes.get(take.lane)
        if lane is None or lane.first > take.position:
            if lane is not None:
                lane.records.close()
            lane = self._lanes[take.lane] = _Lane(self._read_lane(self._shards[take.lane], start), start.position)
        lane.forget(take.position if is_final else start.position)
        for position in range(take.position, take.position + take.num):
            found = lane.get(position)
            if found is None:
                return
            shard, number, record = found
            self._doing = _Place(self._dataset, "decoding", shard, number)
            self._seed(shard, number, _DECODING)
            yield record if self._decode is None else self._decode(record)

    def _read_lane(self, shards: Sequence[int], start: LaneStart) -> Generator[tuple[int, int, Any], None, None]:
        """Yield shard, number in the shard, and record, from `start` on."""
        skip = start.skip
        for shard in shards[start.place :]:
            yield from self._read_shard(shard, skip)
            skip = 0

    def _read_shard(self, shard: int, skip: int) -> Generator[tuple[int, int, Any], None, None]:
        size, known = self._plan.block_size, self._plan.lengths[shard]
        number = skip - skip % size
        self._go_to(shard, number)
        records = iter(self._dataset.open(shard, skip=number))
        is_open = True
        try:
            while is_open:
                block: list[Any] = []
                # After the last sample that is known of, one more is asked for: there should be none.
                while is_open and (len(block) < size or number + len(block) == known):
                    self._go_to(shard, number + len(block))
                    try:
                        block.append(next(records))
                    except StopIteration:
                        is_open = False
                self._check_length(shard, number + len(block), is_open, skip)
                places = self._permute(shard, number, len(block))
                for place in places[max(0, skip - number) :]:
                    yield shard, number + place, block[place]
                number += len(block)
        finally:
            if isinstance(records, Generator):
                records.close()
        self._lengths[shard] = number

    def _permute(self, shard: int, number: int, length: int) -> Sequence[int]:
        if length < 2 or self._plan.block_size == 1:
            return range(length)
        seed = mix_seed(self._plan.seed, shard, number)
        order: list[int] = draw_permutation(length, seed, self._epoch).tolist()
        return order

    def _check_length(self, shard: int, num_read: int, is_open: bool, skip: int) -> None:
        """Raise DataError if the shard has more or fewer samples than was said, or than were read of it before."""
        known = self._plan.lengths[shard]
        if known is not None and (num_read > known or (not is_open and num_read < known)):
            raise DataError(
                f"reading {describe_shard(self._dataset, shard)}",
                found=f"{num_read}{' or more' * is_open} samples, and `num_samples({shard})` is {known}",
                fix="Let `num_samples` return the length of what `open` yields, or None.",
            )
        if not is_open and num_read < skip:
            raise DataError(
                f"reading {describe_shard(self._dataset, shard)} from sample {skip} on",
                found=f"it has {num_read} samples, and {skip} of it were read before",
                fix="Let `open` yield the same records each time; or start over, if the data has changed.",
            )

    def _go_to(self, shard: int, number: int) -> None:
        self._doing = _Place(self._dataset, "reading", shard, number)
        self._seed(shard, number, _READING)

    def _seed(self, *parts: int) -> None:
        if self._seeded:
            seed_random(mix_seed(self._plan.seed, self._epoch, *parts))


class _Place(NamedTuple):
    """The current operation and its sample, for error messages."""

    dataset: Any
    verb: str
    shard: int
    number: int

    def __str__(self) -> str:
        return f"{self.verb} sample {self.number} of {describe_shard(self.dataset, self.shard)}"


class _Lane:
    """An open lane, which keeps the records that may be requested again."""

    def __init__(self, records: Generator[tuple[int, int, Any], None, None], first: int) -> None:
        self.records = records
        self.first = first
        """Number in the lane of the first record that is kept, or else of the next one."""
        self._kept: deque[tuple[int, int, Any]] = deque()

    def get(self, position: int) -> tuple[int, int, Any] | None:
        """Return shard, number in the shard, and record number `position` of the lane; None if it ends before it."""
        while self.first + len(self._kept) <= position:
            found = next(self.records, None)
            if found is None:
                return None
            self._kept.append(found)
        return self._kept[position - self.first]

    def forget(self, position: int) -> None:
        """Drop the records before `position`; those that were not read yet are read."""
        while self.first < position:
            if self._kept:
                self._kept.popleft()
            elif next(self.records, None) is None:
                return
            self.first += 1


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
