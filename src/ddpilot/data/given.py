# SPDX-License-Identifier: Apache-2.0
"""Orders and batches that a sampler of the user's gives, made a function of the epoch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpilot.data.division import Division, Epoch, digest
from ddpilot.data.seeding import mix_seed, random_kept, seed_random
from ddpilot.errors import DataError


class SamplerOrder:
    """The order that `sampler` gives in an epoch: what it draws from global random state depends on the seed alone.

    Its `set_epoch` is called where it has one. `DataError` where it gives other samples when it is asked again.
    """

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        first, second = (as_order(list_sampler(sampler, seed, 0)) for _ in range(2))
        refuse_other(sampler, bool(np.array_equal(first, second)))
        self._length = len(first)
        self.has_repeats = len(np.unique(first)) < len(first)

    def __len__(self) -> int:
        return self._length

    def __call__(self, epoch: int) -> NDArray[np.int64]:
        order = as_order(list_sampler(self._sampler, self._seed, epoch))
        if len(order) != self._length:
            raise DataError(
                f"taking the order of {type(self._sampler).__name__} for epoch {epoch}",
                found=f"{len(order)} samples, and {self._length} in epoch 0",
                fix="Give each epoch as many samples, or give a `batch_sampler`.",
            )
        return order


class GivenBatches:
    """The global batches of a `batch_sampler` of the user's, of any sizes; each is divided among the ranks.

    With `are_divided` they are this rank's own batches already, and used as they are.
    """

    has_repeats = False

    def __init__(self, sampler: Iterable[Any], *, world_size: int, seed: int, are_divided: bool) -> None:
        self.seed = seed
        self._sampler = sampler
        self._division = Division.of(1 if are_divided else world_size)
        first, second = list_sampler(sampler, seed, 0), list_sampler(sampler, seed, 0)
        refuse_other(sampler, [[*batch] for batch in first] == [[*batch] for batch in second])
        self.num_batches = len(first)
        shared = () if are_divided else (*self._division.edges, *map(as_order, first))
        self._fingerprint = digest(seed, *shared)
        self.batches_fingerprint = digest(seed, world_size) if are_divided else digest(seed, *map(as_order, first))
        """What the global batches follow from, as a text; the world size too where they are divided already."""

    def epoch(self, epoch: int) -> Epoch:
        """The batches of `epoch`; their number may be another one in each."""
        batches = [as_order(batch) for batch in list_sampler(self._sampler, self.seed, epoch)]
        order = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
        order.flags.writeable = False
        return Epoch(order, [*accumulate((len(batch) for batch in batches), initial=0)], self._division)

    def fingerprint(self) -> str:
        """What has to be the same on all ranks, as a text: the first epoch, unless each rank has batches of its own."""
        return self._fingerprint


def list_sampler(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """All that `sampler` (or a sampler inside it) gives in `epoch`, with global random state seeded for that."""
    for part in (getattr(sampler, "sampler", None), sampler):
        set_epoch = getattr(part, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
    with random_kept():
        seed_random(mix_seed(seed, epoch, 3))
        return list(sampler)


def as_order(numbers: Any) -> NDArray[np.int64]:
    """Sample numbers as an array. `DataError` where they are none."""
    values = list(numbers)
    order = np.asarray(values)
    if values and (order.ndim != 1 or order.dtype.kind not in "iu"):
        raise DataError(
            "taking the order of a sampler",
            found=f"it gives {values[0]!r}, which is no sample number",
            fix="Let it give whole numbers from 0 to `len(dataset) - 1`.",
        )
    return order.astype(np.int64)


def refuse_other(sampler: Any, is_same: bool) -> None:
    """`DataError` unless `is_same`: ranks that ask for themselves would get different samples."""
    if not is_same:
        raise DataError(
            f"taking the order of {type(sampler).__name__}",
            found="it gives other samples each time it is asked about the same epoch",
            fix="Give it `set_epoch`, from which its order follows, or let it draw from the global random state.",
        )
