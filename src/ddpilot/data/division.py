# SPDX-License-Identifier: Apache-2.0
"""The samples of an epoch, its global batches, and the pieces of those that ranks take."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Division:
    """How the samples of a batch are divided: `rank` takes from `edges[rank] / total` of it to the next edge."""

    edges: tuple[int, ...]

    @classmethod
    def of(cls, world_size: int, shares: Sequence[float] | None = None) -> Division:
        """In proportion to `shares`, one number above 0 for each rank; None: as evenly as it goes."""
        # Whole numbers throughout, so that the ranks of one job cannot round differently.
        parts = [Fraction(1)] * world_size if shares is None else [Fraction(share) for share in shares]
        scale = lcm(*(part.denominator for part in parts))
        sizes = [int(part * scale) for part in parts]
        return cls(tuple(accumulate((size // gcd(*sizes) for size in sizes), initial=0)))

    def piece(self, num: int, rank: int) -> tuple[int, int]:
        """Positions (start, stop) that `rank` takes of `num` samples. Pieces are in the order of the ranks."""
        # Rounded up, so that a last batch of one sample is rank 0's.
        total = self.edges[-1]
        return -(-num * self.edges[rank] // total), -(-num * self.edges[rank + 1] // total)

    def has_empty(self, num: int) -> bool:
        """True if some rank takes none of `num` samples."""
        pieces = (self.piece(num, rank) for rank in range(len(self.edges) - 1))
        return any(start == stop for start, stop in pieces)


@dataclass(frozen=True, eq=False)
class Epoch:
    """The samples of one epoch in their order, and where its global batches begin."""

    order: NDArray[np.int64]
    """Sample numbers, read-only."""

    starts: Sequence[int] | NDArray[np.int64]
    """Position in the order of each global batch, and the end of the last one."""

    division: Division
    """How each is divided among the ranks."""

    keys: NDArray[np.int64] | None = None
    """A name for each batch, that epochs share where a batch of these samples comes in all of them; None: none does."""

    @property
    def num_batches(self) -> int:
        """Global batches."""
        return len(self.starts) - 1

    def batch_size(self, batch: int) -> int:
        """Samples of all ranks together."""
        return int(self.starts[batch + 1]) - int(self.starts[batch])

    def piece(self, batch: int, rank: int) -> tuple[int, int]:
        """Positions (start, stop) in the order that `rank` takes of global batch `batch`."""
        first, end = int(self.starts[batch]), int(self.starts[batch + 1])
        edges = self.division.edges  # as `Division.piece` does it; this is asked twice for every batch
        num, total = first - end, edges[-1]
        return first - num * edges[rank] // total, first - num * edges[rank + 1] // total


def digest(*parts: object) -> str:
    """A short text that is another one where any of `parts` (numbers, texts, None, arrays) is."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
        found.update(b";")
    return found.hexdigest()[:16]
