# SPDX-License-Identifier: Apache-2.0
"""`StreamLoader`: loads a rank's pieces of the global batches of an iterable dataset, with torch's workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ddpilot.data.global_batches import Division, digest
from ddpilot.data.local_batch import (
    LocalBatch,
    SampleDigest,
    digest_sample,
    mix_seed,
    random_apart,
    render_loader,
    seed_random,
)
from ddpilot.data.nested import without_rows
from ddpilot.data.options import Collate
from ddpilot.data.workers import Failure, Workers, catch_failure, draws_randomly
from ddpilot.errors import DataError


class StreamOrder(NamedTuple):
    """One batch to read. `first_batch` and `state`, the state before it or None, are where the pass starts."""

    pass_number: int
    epoch: int
    batch: int
    first_batch: int
    state: Any


class StreamPiece(NamedTuple):
    """A piece that was read. At the end of the stream, `global_count` is 0 and `data` is a batch without samples."""

    data: Any
    num_samples: int
    global_count: int
    start: int
    """Position of its first sample in the stream."""

    state: Any
    """`dataset.state_dict()` after this batch; None without this method, and after a last batch that is smaller."""

    part: int
    """Number of the worker, counted over all ranks, if the dataset divides itself; otherwise 0."""

    first_seen: SampleDigest | None = None
    """The first sample of the global batch; None if ranks need not read the same one, and at the end."""


@dataclass(frozen=True)
class StreamPlan:
    """How the samples of an iterable dataset are divided."""

    global_batch_size: int
    world_size: int
    seed: int
    drop_last: bool
    divides_itself: bool
    division: Division

    @property
    def fingerprint(self) -> str:
        """A hash of what must be equal on all ranks."""
        return digest(self.global_batch_size, self.world_size, self.seed, self.drop_last, *self.division.edges)

    @property
    def batches_fingerprint(self) -> str:
        """A hash of what determines the global batches; includes the world size if the dataset divides itself."""
        divided = (self.world_size, *self.division.edges) if self.divides_itself else ()
        return digest(self.global_batch_size, self.seed, self.drop_last, *divided)


class StreamReader(Dataset[Any]):
    """A dataset of whole pieces: `reader.__getitems__([order])` is a `StreamPiece` or a `Failure`.

    It keeps its position in the stream between calls. Without `divides_itself` it reads the whole stream and takes this
    rank's piece of the requested batches: every worker of every rank sees the same stream. With it, the stream is this
    worker's own. `compared`: include the digest of the first sample of each batch.
    """

    def __init__(
        self, dataset: Any, plan: StreamPlan, *, rank: int, collate: Collate, seeded: bool, compared: bool = False
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._rank = rank
        self._collate = collate
        self._seeded = seeded
        self._compared = compared
        self._pass_number = -1
        self._stream: Iterator[Any] = iter(())
        self._position = 0
        self._part = 0
        self._last_sample: list[Any] = []
        """A sample of which an empty batch can be made, if there was one."""

    def __getitems__(self, orders: Sequence[StreamOrder]) -> StreamPiece | Failure:
        (order,) = orders
        try:
            with random_apart() if self._seeded else nullcontext(), self._worker_info():
                self._start(order)
                return self._read(order)
        except Exception as error:  # noqa: BLE001 - the rank raises it, with its number
            doing = f"reading sample {self._position} of the stream (batch {order.batch} of epoch {order.epoch})"
            return catch_failure(doing, "Iterate over the dataset without a loader, or check `collate_fn`.", error)

    def _start(self, order: StreamOrder) -> None:
        if order.pass_number == self._pass_number:
            return
        self._pass_number = order.pass_number
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(order.epoch)
        self._position = 0
        if order.state is not None and hasattr(self._dataset, "load_state_dict"):
            self._dataset.load_state_dict(order.state)
            self._position = order.first_batch * self._plan.global_batch_size
        self._seed(order.epoch)
        self._stream = iter(self._dataset)

    def _read(self, order: StreamOrder) -> StreamPiece:
        size = self._plan.global_batch_size
        if self._plan.divides_itself:
            start, stop = self._plan.division.piece(size, self._rank)
            samples = list(islice(self._samples(order.epoch), stop - start))
            self._last_sample = samples[:1] or self._last_sample
            return self._piece(order, samples, len(samples), self._position - len(samples))
        behind = order.batch * size - self._position
        samples = list(islice(self._samples(order.epoch), behind, behind + size))
        if self._plan.drop_last and len(samples) < size:
            samples = []
        self._last_sample = samples[:1] or self._last_sample
        start, stop = self._plan.division.piece(len(samples), self._rank)
        piece = self._piece(order, samples[start:stop], len(samples), order.batch * size + start)
        return piece._replace(first_seen=digest_sample(samples[0])) if samples and self._compared else piece

    def _piece(self, order: StreamOrder, samples: list[Any], global_count: int, start: int) -> StreamPiece:
        if self._seeded:
            seed_random(mix_seed(self._plan.seed, order.epoch, order.batch, 1))
        if samples:
            data = self._collate(samples)
        elif self._last_sample:
            data = without_rows(self._collate(self._last_sample), self._collate(self._last_sample * 2))
        else:
            data = None
        can_resume = hasattr(self._dataset, "state_dict") and hasattr(self._dataset, "load_state_dict")
        # A state after the end would restart the stream.
        is_inside = global_count == self._plan.global_batch_size and not self._plan.divides_itself
        state = self._dataset.state_dict() if can_resume and is_inside else None
        return StreamPiece(data, len(samples), global_count, start, state, self._part)

    def _samples(self, epoch: int) -> Iterator[Any]:
        while True:
            self._seed(epoch)
            try:
                sample = next(self._stream)
            except StopIteration:
                return
            self._position += 1
            yield sample

    def _seed(self, epoch: int) -> None:
        if self._seeded:
            seed_random(mix_seed(self._plan.seed, epoch, self._position, self._part, 2))

    @contextmanager
    def _worker_info(self) -> Iterator[None]:
        """Set what `get_worker_info()` returns while the dataset is read: None, or rank x worker if it divides."""
        info = get_worker_info()
        shown = None
        if self._plan.divides_itself:
            number, num_workers = (info.id, info.num_workers) if info else (0, 1)
            self._part = self._rank * num_workers + number
            shown = torch_worker.WorkerInfo(
                id=self._part,
                num_workers=self._plan.world_size * num_workers,
                seed=info.seed if info else self._plan.seed,
                dataset=self._dataset,
            )
        torch_worker._worker_info = shown
        try:
            yield
        finally:
            torch_worker._worker_info = info


class StreamLoader:
    """A rank's pieces of the global batches of an iterable dataset.

    Created by `make_stream_loader` or `prepare_data_loader`.

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
        self._num_passes = 0
        seeded = seed_samples and draws_randomly(dataset, collate)
        # Without seeds, random draws in a sample may differ between ranks.
        compared = seed_samples and plan.world_size > 1 and not plan.divides_itself
        reader = StreamReader(dataset, plan, rank=rank, collate=collate, seeded=seeded, compared=compared)
        self._workers = Workers(reader, rank, options)

    def __repr__(self) -> str:
        return render_loader(self)

    def __len__(self) -> int:
        if self.plan.divides_itself or not hasattr(self.dataset, "__len__"):
            raise TypeError(f"the number of batches of {type(self.dataset).__name__} is unknown until it has been read")
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
        self._num_passes += 1
        number = self._num_passes
        # Endless: the stream determines the end.
        orders = ([StreamOrder(number, epoch, batch, first_batch, state)] for batch in count(first_batch))
        return self._workers.read(orders, mix_seed(self.plan.seed, epoch, self.rank))


def _as_batch(piece: StreamPiece, index: int, global_count: int | None, start: int) -> LocalBatch:
    ids = np.arange(piece.num_samples, dtype=np.int64) + start if start >= 0 else np.full(piece.num_samples, -1)
    return LocalBatch(piece.data, index, piece.num_samples, global_count, ids, piece.state, piece.first_seen)
