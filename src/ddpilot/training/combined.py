# SPDX-License-Identifier: Apache-2.0
"""`CombinedLoader`: the batches of several loaders in one pass, in step or drawn by weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ddpilot.data.global_batches import digest
from ddpilot.data.local_batch import LocalBatch, SampleDigest, mix_seed
from ddpilot.data.stream_loader import StreamLoader
from ddpilot.errors import DataError, LoopError
from ddpilot.training.batch_groups import BatchPart, check_loader, is_uneven, length_of

Ends = Literal["shortest", "longest"]
_COMBINING = "combining loaders"
_REPEAT = 24
"""The pass number is in the bits from this one on of a repeated loader's epoch, so that its order differs."""
_DRAWN_AT_ONCE = 1024


@dataclass(eq=False, slots=True, kw_only=True)
class CombinedBatch(LocalBatch):
    """This rank's piece of a batch of several loaders: a tuple with one of each, or with weights that of one loader."""

    parts: tuple[BatchPart, ...] = ()
    """The piece of each loader; () with weights."""
    source: int = 0
    """With weights, the index of the loader that the batch is from."""
    has_empty_part: bool = False
    """True if some rank has no sample of one of the loaders. The same on every rank."""


@dataclass(frozen=True, kw_only=True)
class CombinedPlan:
    """What the batches of a combined pass depend on."""

    num_samples: int | None
    """Samples of all loaders; None if one of them has no length."""
    global_batch_size: int
    num_batches: int | None
    """Batches in an epoch; None if it depends on the epoch, or is unknown."""
    fingerprint: str
    """A hash of what must be equal on all ranks."""
    batches_fingerprint: str
    """A hash of what determines the global batches, at any world size."""


class CombinedLoader:
    """The batches of several `loaders` in one pass; see `Loop.batches`. Raises LoopError for invalid arguments.

    A loader that is repeated has a new order each time. `len()` is the number of batches in an epoch; it raises
    TypeError if it is unknown, or depends on the epoch.
    """

    def __init__(
        self, loaders: Sequence[Any], *, ends: Ends = "shortest", weights: Sequence[float] | None = None, seed: int
    ) -> None:
        self.loaders = tuple(loaders)
        self._ends = ends
        self._seed = seed
        self._lengths = _check(self.loaders, ends, weights)
        self._weights = None if weights is None else [float(weight) for weight in weights]
        self.plan = self._make_plan()

    @property
    def dataset(self) -> object:
        """The dataset of the first loader, by which a later pass over the same data is recognised."""
        return getattr(self.loaders[0], "dataset", None)

    @property
    def is_read_by_all(self) -> bool:
        """True if a loader is of a stream that every rank reads whole, and its samples have to be compared."""
        return any(isinstance(one, StreamLoader) for one in self.loaders)

    def __repr__(self) -> str:
        return f"CombinedLoader({', '.join(map(repr, self.loaders))})"

    def __len__(self) -> int:
        if self.plan.num_batches is None:
            raise TypeError("the number of batches of the combined loaders is unknown")
        return self.plan.num_batches

    def iterate(self, epoch: int, first_batch: int = 0) -> Iterator[CombinedBatch]:
        """Yield this rank's pieces from batch `first_batch` on. Not collective. Raises DataError."""
        return self._in_step(epoch, first_batch) if self._weights is None else self._drawn(epoch, first_batch)

    def _make_plan(self) -> CombinedPlan:
        plans = [one.plan for one in self.loaders]
        sizes = [getattr(plan, "num_samples", None) for plan in plans]
        how = (self._ends, self._seed if self._weights else 0, *(self._weights or ()))
        num_batches = None
        if self._weights is None and None not in self._lengths:  # a stream without a length may be the shortest
            choose = max if self._ends == "longest" else min
            num_batches = choose(length for length in self._lengths if length is not None)
        return CombinedPlan(
            num_samples=None if None in sizes else sum(sizes),  # type: ignore[arg-type]
            global_batch_size=sum(plan.global_batch_size for plan in plans),
            num_batches=num_batches,
            fingerprint=digest(*how, *(plan.fingerprint for plan in plans)),
            batches_fingerprint=digest(*how, *(plan.batches_fingerprint for plan in plans)),
        )

    def _in_step(self, epoch: int, first_batch: int) -> Iterator[CombinedBatch]:
        num_batches = max(length or 0 for length in self._lengths) if self._ends == "longest" else None
        streams = [self._batches_of(index, epoch, first_batch) for index in range(len(self.loaders))]
        try:
            index = first_batch
            while num_batches is None or index < num_batches:
                pieces = []
                for stream in streams:
                    piece = next(stream, None)
                    if piece is None:
                        return
                    pieces.append(piece)
                yield self._join(pieces, index)
                index += 1
        finally:
            for stream in streams:
                stream.close()  # type: ignore[attr-defined]

    def _drawn(self, epoch: int, first_batch: int) -> Iterator[CombinedBatch]:
        used = [0] * len(self.loaders)
        streams: dict[int, Iterator[LocalBatch]] = {}
        try:
            for index, source in enumerate(self._draw(epoch)):
                if self._ends == "longest" and all(
                    num >= (length or 0) for num, length in zip(used, self._lengths, strict=True)
                ):
                    return
                length = self._lengths[source]
                if self._ends == "shortest" and length is not None and used[source] >= length:
                    return
                if index >= first_batch:
                    if source not in streams:
                        streams[source] = self._batches_of(source, epoch, used[source])
                    piece = next(streams[source], None)
                    if piece is None:
                        return
                    yield self._single(piece, index, source)
                used[source] += 1
        finally:
            for stream in streams.values():
                stream.close()  # type: ignore[attr-defined]

    def _draw(self, epoch: int) -> Iterator[int]:
        """Yield the loader of each batch, without end: a function of seed and epoch."""
        weights = np.asarray(self._weights)
        generator = np.random.default_rng(mix_seed(self._seed, epoch, len(weights)))
        while True:
            yield from generator.choice(len(weights), _DRAWN_AT_ONCE, p=weights / weights.sum()).tolist()

    def _batches_of(self, source: int, epoch: int, first_batch: int) -> Iterator[LocalBatch]:
        """Yield a loader's pieces from its batch `first_batch` on, again and again if it is repeated."""
        loader, length = self.loaders[source], self._lengths[source]
        if self._ends == "shortest":
            yield from loader.iterate(epoch, first_batch)
            return
        assert length is not None  # checked by _check()
        number, start = divmod(first_batch, length)
        while True:
            batches = 0
            for piece in loader.iterate(epoch + (number << _REPEAT), start):
                batches += 1
                yield piece
            if batches != length - start:
                found = f"loader {source} ended after {start + batches} batches, and its length is {length}"
                raise DataError("repeating a loader", found=found, fix="Let `len(dataset)` be what it yields.")
            number, start = number + 1, 0

    def _join(self, pieces: Sequence[LocalBatch], index: int) -> CombinedBatch:
        parts = tuple(BatchPart(one.count, one.global_count or 0, one.sample_ids) for one in pieces)
        return CombinedBatch(
            data=tuple(one.data for one in pieces),
            index=index,
            count=sum(part.count for part in parts),
            global_count=sum(part.global_count for part in parts),
            sample_ids=np.concatenate([part.sample_ids for part in parts]),
            first_seen=_join_digests(pieces),
            parts=parts,
            has_empty_part=any(
                is_uneven(loader, part.global_count) for loader, part in zip(self.loaders, parts, strict=True)
            ),
        )

    def _single(self, piece: LocalBatch, index: int, source: int) -> CombinedBatch:
        return CombinedBatch(
            data=piece.data,
            index=index,
            count=piece.count,
            global_count=piece.global_count,
            sample_ids=piece.sample_ids,
            first_seen=piece.first_seen,
            source=source,
            has_empty_part=is_uneven(self.loaders[source], piece.global_count or 0),
        )


def _join_digests(pieces: Sequence[LocalBatch]) -> SampleDigest | None:
    seen = [one.first_seen for one in pieces if one.first_seen is not None]
    if not seen:
        return None
    return SampleDigest(
        zlib.crc32(b"".join(one.number.to_bytes(4, "big") for one in seen)), " and ".join(one.text for one in seen)
    )


def _check(loaders: Sequence[Any], ends: object, weights: Sequence[float] | None) -> list[int | None]:
    """Return the number of batches of each loader, None if unknown. Raises LoopError for invalid arguments."""
    for loader in loaders:
        check_loader(loader)
        if not hasattr(loader, "plan") or getattr(loader, "is_joint", False):
            found = "a loader whose batches are divided by the dataset or by a sampler, or of shards of unknown length"
            fix = "Let loop.loader divide a dataset that yields every sample; of shards, one with `num_samples(shard)`."
            raise LoopError(_COMBINING, found=found, fix=fix)
    if len(loaders) < 2:
        fix = "Give two loaders or more: loop.batches(labelled, unlabelled, ends='longest')."
        raise LoopError(_COMBINING, found="`ends` or `weights`, and one loader", fix=fix)
    if len({id(loader) for loader in loaders}) < len(loaders):
        raise LoopError(_COMBINING, found="the same loader twice", fix="Make a second loader, with its own `seed`.")
    if ends not in ("shortest", "longest"):
        raise LoopError(_COMBINING, found=f"`ends` is {ends!r}", fix="Use 'shortest' or 'longest'.")
    if weights is not None:
        _check_weights(weights, len(loaders))
    lengths = [length_of(loader) for loader in loaders]
    if ends == "longest" and None in lengths:
        found = f"`ends='longest'`, and loader {lengths.index(None)} is of a dataset without a length"
        raise LoopError(_COMBINING, found=found, fix="Use ends='shortest', or give the dataset a `__len__`.")
    if ends == "longest" and 0 in lengths:
        found = f"loader {lengths.index(0)} has no batch that could be repeated"
        raise LoopError(_COMBINING, found=found, fix="Use a smaller batch size, or drop_last=False.")
    return lengths


def _check_weights(weights: Any, num: int) -> None:
    numbers = list(weights) if hasattr(weights, "__iter__") else None
    if numbers is None or len(numbers) != num:
        found = f"`weights` is {weights!r}, for {num} loaders"
        raise LoopError(_COMBINING, found=found, fix="Give a number for each loader: [3, 1].")
    for number in numbers:
        if not isinstance(number, int | float | np.number) or not 0 < number < math.inf:
            found = f"`weights` has {number!r}"
            raise LoopError(_COMBINING, found=found, fix="Give finite numbers above 0; leave other loaders out.")
