# SPDX-License-Identifier: Apache-2.0
"""`Plan`: the order of an epoch's samples, its global batches, and the contiguous piece of each rank.

The order is a function of seed and epoch, never of rank or world size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from ddpilot.errors import DataError


@dataclass(frozen=True, eq=False)
class Division:
    """How a batch is divided: `rank` takes the samples from `edges[rank] / total` to the next edge."""

    edges: tuple[int, ...]

    @classmethod
    def of(cls, world_size: int, batch_split: Sequence[float] | None = None) -> Division:
        """Divide in proportion to `batch_split`, one number above 0 per rank; None: as evenly as possible."""
        # Integers throughout, so that rounding cannot differ between the ranks of a job.
        parts = [Fraction(1)] * world_size if batch_split is None else [Fraction(share) for share in batch_split]
        scale = lcm(*(part.denominator for part in parts))
        sizes = [int(part * scale) for part in parts]
        return cls(tuple(accumulate((size // gcd(*sizes) for size in sizes), initial=0)))

    def piece(self, num: int, rank: int) -> tuple[int, int]:
        """Return the positions (start, stop) that `rank` takes of `num` samples. Pieces are in rank order."""
        # Rounded up, so that a last batch of one sample goes to rank 0.
        total = self.edges[-1]
        return -(-num * self.edges[rank] // total), -(-num * self.edges[rank + 1] // total)

    def sizes(self, num: int) -> list[int]:
        """Return the number of samples that each rank takes of `num` samples."""
        pieces = (self.piece(num, rank) for rank in range(len(self.edges) - 1))
        return [stop - start for start, stop in pieces]

    def has_empty(self, num: int) -> bool:
        """True if at least one rank gets no sample of `num`."""
        return 0 in self.sizes(num)


@dataclass(frozen=True, eq=False)
class Epoch:
    """The samples of one epoch in their order, and the starts of its global batches."""

    order: NDArray[np.int64]
    """Sample indices, read-only."""

    starts: Sequence[int] | NDArray[np.int64]
    """Position in the order of each global batch, and the end of the last one."""

    division: Division
    """How each batch is divided among the ranks."""

    @property
    def num_batches(self) -> int:
        """Number of global batches."""
        return len(self.starts) - 1

    def batch_size(self, batch: int) -> int:
        """Return the number of samples of all ranks in `batch`."""
        return int(self.starts[batch + 1]) - int(self.starts[batch])

    def piece(self, batch: int, rank: int) -> tuple[int, int]:
        """Return the positions (start, stop) in the order that `rank` takes of global batch `batch`."""
        first, end = int(self.starts[batch]), int(self.starts[batch + 1])
        edges = self.division.edges  # same as `Division.piece`, inlined as it is called twice per batch
        num, total = first - end, edges[-1]
        return first - num * edges[rank] // total, first - num * edges[rank + 1] // total


def digest(*parts: object) -> str:
    """Return a short hash of `parts` (numbers, strings, None, arrays)."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
        found.update(b";")
    return found.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Plan:
    """How an epoch's samples are divided into global batches, and these among the ranks. No sample is added or lost.

    The order of an epoch is a function of `seed` and the epoch only; global batch k is `order[k * B:(k + 1) * B]` with
    B = `global_batch_size`, and every rank takes a contiguous piece of it. So an epoch is the same at any world size,
    and a position in it is one number. Raises `DataError` for invalid combinations.
    """

    num_samples: int
    """Length of the dataset; 0 is an epoch without batches (rejected with `shuffle`, `weights` or `drop_last`)."""

    global_batch_size: int
    """Number of samples per batch on all ranks, at least one per rank (but see `empty_ranks`); the last batch may be
    smaller."""

    _: KW_ONLY

    world_size: int
    """Number of ranks."""

    seed: int = 0
    """Seed of the order."""

    shuffle: bool = False
    """True if each epoch has a different order; False: 0, 1, 2, ... Ignored with `weights`."""

    drop_last: bool = False
    """True if a last batch that is smaller than `global_batch_size` is dropped, on all ranks."""

    batch_split: Sequence[float] | None = None
    """Proportions of each batch that ranks take, one number above 0 per rank: [2, 1] is twice as much for rank 0."""

    weights: Sequence[float] | NDArray[np.float64] | None = None
    """One weight per sample: an epoch then has `num_draws` draws, with probabilities proportional to the weights."""

    num_draws: int | None = None
    """Number of samples in an epoch with `weights` or `sampler`; None: `num_samples`."""

    replacement: bool = True
    """True if a sample can be drawn several times in an epoch. Only used with `weights`."""

    sampler: Callable[[int], NDArray[np.int64]] | None = None
    """The order as a function of the epoch, equal on every rank; returns `num_draws` sample indices."""

    empty_ranks: bool = False
    """True if batches may have fewer samples than there are ranks, so that some ranks get empty batches. For
    evaluation; in training these ranks would contribute nothing."""

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.weights is not None:
            weights = check_weights(self.weights, self.num_samples, self.epoch_size, self.replacement)
            object.__setattr__(self, "weights", weights)
        if self.batch_split is not None:
            object.__setattr__(self, "batch_split", tuple(float(share) for share in self.batch_split))
        self._check_not_empty()
        if not self.empty_ranks:
            self._check_pieces()

    @property
    def epoch_size(self) -> int:
        """Number of samples in an epoch: `num_samples`, or `num_draws`."""
        return self.num_samples if self.num_draws is None else self.num_draws

    @property
    def num_batches(self) -> int:
        """Number of global batches in an epoch."""
        rounding = 0 if self.drop_last else self.global_batch_size - 1
        return (self.epoch_size + rounding) // self.global_batch_size

    @property
    def has_repeats(self) -> bool:
        """True if a sample can occur several times in an epoch."""
        return (self.weights is not None and self.replacement) or bool(getattr(self.sampler, "has_repeats", False))

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the sample indices in the order of `epoch` (0, 1, ...), shape (`epoch_size`,), at any world size."""
        if self.sampler is not None:
            return self._check_order(self.sampler(epoch), epoch)
        if self.weights is not None:
            weights = np.asarray(self.weights)
            return draw_weighted(weights, self.epoch_size, self.replacement, self.seed, epoch)
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        return draw_permutation(self.num_samples, self.seed, epoch)

    def epoch(self, epoch: int) -> Epoch:
        """Return `order(epoch)` with its batches, computed once for all of them."""
        order = self.order(epoch)
        order.flags.writeable = False
        starts = range(0, (self.num_batches + 1) * self.global_batch_size, self.global_batch_size)
        ends = np.minimum(np.asarray(starts, dtype=np.int64), self.epoch_size)
        return Epoch(order, ends, self.division)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what must be equal on all ranks: otherwise they would silently train on different batches."""
        return digest(self.world_size, *self.division.edges, self.batches_fingerprint)

    @cached_property
    def batches_fingerprint(self) -> str:
        """A hash of what determines the global batches, the same at any world size and with any `batch_split`."""
        sizes = (self.num_samples, self.global_batch_size, self.num_draws)
        flags = (self.seed, self.shuffle, self.drop_last, self.replacement)
        return digest(*sizes, *flags, self.weights, None if self.sampler is None else self.order(0))

    def batch_size(self, batch: int) -> int:
        """Return the number of samples of all ranks in `batch`: `global_batch_size`, or fewer in a last one."""
        if not 0 <= batch < self.num_batches:
            raise IndexError(f"batch {batch} of an epoch of {self.num_batches} batches")
        return min(self.global_batch_size, self.epoch_size - batch * self.global_batch_size)

    @cached_property
    def division(self) -> Division:
        """How each batch is divided among the ranks."""
        return Division.of(self.world_size, self.batch_split)

    def _check_order(self, order: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        bad = order[(order < 0) | (order >= self.num_samples)][:1].tolist()
        if bad or len(order) != self.epoch_size:
            raise DataError(
                f"taking the order of epoch {epoch} from a sampler",
                found=f"sample {bad[0]} of {self.num_samples}" if bad else f"{len(order)} samples of {self.epoch_size}",
                fix="Let the sampler return `num_draws` indices into this dataset.",
            )
        return order

    def _check_sizes(self) -> None:
        did = f"dividing {self.num_samples} samples among {self.world_size} ranks"
        least = {"num_samples": 0, "global_batch_size": 1, "world_size": 1, "num_draws": 1}
        for name, at_least in least.items():
            value = getattr(self, name)
            if value is not None and value < at_least:
                raise DataError(did, found=f"`{name}` is {value}", fix=f"Give at least {at_least}.")
        if self.num_draws is not None and self.weights is None and self.sampler is None:
            raise DataError(
                did,
                found=f"`num_draws` is {self.num_draws}, without `weights`",
                fix="Give `weights`, all 1 for equal probabilities.",
            )
        if self.batch_split is not None and (
            len(self.batch_split) != self.world_size or not all(0 < share < float("inf") for share in self.batch_split)
        ):
            raise DataError(
                did, found=f"`batch_split` is {list(self.batch_split)}", fix="Give one number above 0 for each rank."
            )

    def _check_pieces(self) -> None:
        size = self.global_batch_size
        did = f"dividing a global batch of {size} sample{'s' * (size != 1)} among {self.world_size} ranks"
        if size < self.world_size:
            raise DataError(
                did,
                found="at least one rank would never have a sample",
                fix=f"Use a `global_batch_size` of at least {self.world_size}, `batch_size_per_rank`, or fewer ranks.",
            )
        if 0 in (sizes := self.division.sizes(size)):
            found = f"with `batch_split={list(self.batch_split or ())}` rank {sizes.index(0)} would never have a sample"
            raise DataError(did, found=found, fix="Increase its share or the `global_batch_size`.")

    def _check_not_empty(self) -> None:
        name = "shuffle" if self.shuffle else "weights" if self.weights is not None else ""
        if name and not self.num_samples:
            raise DataError(
                f"planning an epoch with `{name}`",
                found="the dataset is empty",
                fix="Check where its samples come from.",
            )
        if self.drop_last and not self.num_batches:
            raise DataError(
                f"planning an epoch of global batches of {self.global_batch_size} with `drop_last`",
                found=f"{self.epoch_size} samples are less than one batch, so all of them would be dropped",
                fix="Use a smaller `global_batch_size`, or `drop_last=False`.",
            )


_ORDER = 0x0D0E


def draw_permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of 0 to `num_samples` - 1, the same for equal `seed` and `epoch` on every machine."""
    # Indices in the low bits of random keys: sorting these is several times faster than `argsort`.
    low = np.uint64(max(num_samples - 1, 0).bit_length())
    keys = (_bits(num_samples, seed, epoch) >> low << low) | np.arange(num_samples, dtype=np.uint64)
    keys.sort()
    return np.asarray(keys & ((np.uint64(1) << low) - np.uint64(1)), dtype=np.int64)


def draw_weighted(
    weights: NDArray[np.float64], num_draws: int, replacement: bool, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Draw `num_draws` sample indices, each with a probability proportional to its entry in `weights`.

    Without `replacement` no index is drawn twice, and the order is that of successive draws from the remaining samples.
    """
    if replacement:
        edges = np.cumsum(weights / weights.max())  # a sum of large weights would overflow
        # A point may round up to the last edge; entries with weight 0 have an empty interval.
        points = np.minimum(_points(num_draws, seed, epoch) * edges[-1], np.nextafter(edges[-1], 0.0))
        return np.asarray(np.searchsorted(edges, points, side="right"), dtype=np.int64)
    # Exponential waiting times with these rates end in the order of successive draws (Efraimidis and Spirakis, 2006).
    # Logarithms are compared, as a quotient by a tiny weight would overflow.
    points = np.maximum(_points(len(weights), seed, epoch), 2.0**-54)
    waits = np.full(len(weights), np.inf)
    drawable = weights > 0
    waits[drawable] = np.log(-np.log1p(-points[drawable])) - np.log(weights[drawable])
    return np.argsort(waits, kind="stable")[:num_draws].astype(np.int64, copy=False)


def check_weights(
    weights: Sequence[float] | NDArray[np.float64], num_samples: int, num_draws: int, replacement: bool
) -> NDArray[np.float64]:
    """Return `weights` as a read-only copy. Raises `DataError` unless they are one finite number >= 0 per sample."""
    did = f"drawing {num_draws} of {num_samples} samples by weight"
    array = np.array(weights, dtype=np.float64)
    if array.shape != (num_samples,):
        raise DataError(did, found=f"`weights` has the shape {array.shape}", fix="Give one weight for each sample.")
    if bad := np.flatnonzero(~(np.isfinite(array) & (array >= 0)))[:1].tolist():
        raise DataError(did, found=f"weights[{bad[0]}] is {array[bad[0]]}", fix="A weight is finite and not negative.")
    num_drawable = int(np.count_nonzero(array))
    if num_drawable == 0 or (not replacement and num_draws > num_drawable):
        raise DataError(
            did,
            found=f"{num_drawable} samples have a weight above 0, and a sample can be drawn "
            + ("any number of times (`replacement=True`)" if replacement else "only once (`replacement=False`)"),
            fix="Increase the weights that are 0, or draw fewer samples (`num_draws`).",
        )
    array.flags.writeable = False
    return array


def _bits(num: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    entropy = (seed % 2**64, epoch, _ORDER)
    return np.asarray(np.random.Philox(np.random.SeedSequence(entropy)).random_raw(num), dtype=np.uint64)


def _points(num: int, seed: int, epoch: int) -> NDArray[np.float64]:
    """Return `num` numbers in [0, 1), multiples of 2**-53."""
    return np.asarray((_bits(num, seed, epoch) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)
