# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch's samples, its global batches, and the pieces of batches that ranks take."""

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
    """How a batch is divided: `rank` takes the samples from `edges[rank] / total` to the next edge."""

    edges: tuple[int, ...]

    @classmethod
    def of(cls, world_size: int, shares: Sequence[float] | None = None) -> Division:
        """Divide in proportion to `shares`, one number above 0 per rank; None: as evenly as possible."""
        # Integers throughout, so that rounding cannot differ between the ranks of a job.
        parts = [Fraction(1)] * world_size if shares is None else [Fraction(share) for share in shares]
        scale = lcm(*(part.denominator for part in parts))
        sizes = [int(part * scale) for part in parts]
        return cls(tuple(accumulate((size // gcd(*sizes) for size in sizes), initial=0)))

    def piece(self, num: int, rank: int) -> tuple[int, int]:
        """Return the positions (start, stop) that `rank` takes of `num` samples. Pieces are in rank order."""
        # Rounded up, so that a last batch of one sample goes to rank 0.
        total = self.edges[-1]
        return -(-num * self.edges[rank] // total), -(-num * self.edges[rank + 1] // total)

    def has_empty(self, num: int) -> bool:
        """True if a rank takes none of `num` samples."""
        pieces = (self.piece(num, rank) for rank in range(len(self.edges) - 1))
        return any(start == stop for start, stop in pieces)


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
