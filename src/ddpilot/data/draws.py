# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch's samples: a function of seed and epoch, never of rank or world size.

Uses only NumPy's bit generators and seed sequences, whose streams are stable by NumPy's policy. `Generator.permutation`
and `choice` may change between versions, but a checkpoint has to resume with a newer one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddpilot.errors import DataError

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
            found=f"{num_drawable} samples have a weight above 0, and a sample comes "
            + ("any number of times (`replacement=True`)" if replacement else "only once (`replacement=False`)"),
            fix="Raise the weights that are 0, or draw fewer (`num_draws`).",
        )
    array.flags.writeable = False
    return array


def _bits(num: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    entropy = (seed % 2**64, epoch, _ORDER)
    return np.asarray(np.random.Philox(np.random.SeedSequence(entropy)).random_raw(num), dtype=np.uint64)


def _points(num: int, seed: int, epoch: int) -> NDArray[np.float64]:
    """Return `num` numbers in [0, 1), multiples of 2**-53."""
    return np.asarray((_bits(num, seed, epoch) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)
