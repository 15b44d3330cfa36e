# SPDX-License-Identifier: Apache-2.0
"""User-supplied samplers and batch samplers, made reproducible per epoch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpilot.data.division import Division, Epoch, digest
from ddpilot.data.sample_seeds import mix_seed, random_kept, seed_random
from ddpilot.errors import DataError


class SamplerOrder:
    """The order of `sampler` in an epoch, with global random state seeded from seed and epoch.

    Calls its `set_epoch` if it has one. Raises `DataError` if it returns different samples when it is iterated again.
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
    """The global batches of a user's `batch_sampler`, of any sizes; each is divided among the ranks.

    With `are_divided`, they are this rank's own batches, which are not divided further.
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
        """A hash of what determines the global batches; includes the world size if they are divided already."""

    def epoch(self, epoch: int) -> Epoch:
        """Return the batches of `epoch`, whose number may differ between epochs."""
        batches = [as_order(batch) for batch in list_sampler(self._sampler, self.seed, epoch)]
        order = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
        order.flags.writeable = False
        return Epoch(order, [*accumulate((len(batch) for batch in batches), initial=0)], self._division)

    def fingerprint(self) -> str:
        """A hash of what must be equal on all ranks: the first epoch, unless each rank has its own batches."""
        return self._fingerprint


def list_sampler(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """List what `sampler` (with a sampler inside it) yields in `epoch`, with global random state seeded per epoch."""
    for part in (getattr(sampler, "sampler", None), sampler):
        set_epoch = getattr(part, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
    with random_kept():
        seed_random(mix_seed(seed, epoch, 3))
        return list(sampler)


def as_order(numbers: Any) -> NDArray[np.int64]:
    """Return sample indices as an array. Raises `DataError` if they are not integers."""
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
    """Raise `DataError` unless `is_same`: ranks that iterate separately would get different samples."""
    if not is_same:
        raise DataError(
            f"taking the order of {type(sampler).__name__}",
            found="it gives other samples each time it is asked about the same epoch",
            fix="Give it `set_epoch`, from which its order follows, or let it draw from the global random state.",
        )
