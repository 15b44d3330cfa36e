# SPDX-License-Identifier: Apache-2.0
"""Read sampling and worker options from a DataLoader, and make its samplers reproducible per epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddpilot.data.global_batches import Division, Epoch, digest, draw_permutation
from ddpilot.data.local_batch import mix_seed, random_kept, seed_random
from ddpilot.errors import DataError

_DID = "preparing a DataLoader"


@dataclass(frozen=True)
class DataLoaderSpec:
    """How to read from an existing loader: arguments of `Plan`, or its own batches."""

    seed: int
    batch_size: int
    drop_last: bool
    plan: dict[str, Any] = field(default_factory=dict)
    """shuffle, weights, num_draws, replacement, sampler."""

    batches: Any = None
    """The loader's own batch sampler, if it has one."""

    are_divided: bool = False
    """True if those batches, or the batch size, are for one rank."""


def read_loader(loader: Any, seed: int) -> DataLoaderSpec:
    """Return how the map-style `loader` makes its batches. `seed` is used if its generator does not determine one.

    Raises `DataError` if its batches cannot be divided exactly.
    """
    refuse_whole_batches(loader)
    batch_sampler = loader.batch_sampler
    seed = read_seed(loader, seed)
    if type(batch_sampler) is not BatchSampler:
        return DataLoaderSpec(seed, 0, False, batches=batch_sampler, are_divided=_is_divided(batch_sampler))
    sampler: Any = batch_sampler.sampler
    size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
    num_samples = len(loader.dataset)
    if type(sampler) is DistributedSampler:
        num_first = _count_source(sampler, sampler.dataset, num_samples)
        order = _order_first(num_first, num_samples, sampler.shuffle, sampler.seed)
        return DataLoaderSpec(sampler.seed, size, drop_last, order, are_divided=True)
    if _is_divided(sampler):
        return DataLoaderSpec(seed, size, drop_last, batches=batch_sampler, are_divided=True)
    return DataLoaderSpec(seed, size, drop_last, _read_sampler(sampler, seed, num_samples))


def read_seed(loader: DataLoader[Any], seed: int) -> int:
    """Return the initial seed of the generator that determines the order of `loader`; `seed` if it has none."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    generators = (getattr(sampler, "generator", None), loader.generator)
    return next((one.initial_seed() for one in generators if isinstance(one, torch.Generator)), seed)


def read_worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the loader's worker options, as arguments of another DataLoader."""
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    options = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        options |= {name: getattr(loader, name) for name in ("prefetch_factor", "persistent_workers")}
    return options


def refuse_other_loaders(loader: Any) -> None:
    """Raise `DataError` unless `loader` is a torch DataLoader that does not override `__iter__`."""
    if not isinstance(loader, DataLoader):
        raise DataError(
            _DID, found=f"a {type(loader).__name__}", fix="Give a torch DataLoader; a dataset goes to loop.loader()."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise DataError(
            _DID,
            found=f"{type(loader).__name__} overrides `__iter__`, which may change the samples",
            fix="Do that in the dataset or in `collate_fn`, and give a plain DataLoader.",
        )


def refuse_whole_batches(loader: Any) -> None:
    """Raise `DataError` if the dataset returns whole batches, which cannot be divided."""
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            _DID,
            found="its `batch_size` is None, so its dataset returns whole batches",
            fix="Let the dataset return single samples, and give a `batch_size`.",
        )


def _read_sampler(sampler: Any, seed: int, num_samples: int) -> dict[str, Any]:
    kind = type(sampler)
    if kind is SequentialSampler:
        return _order_first(_count_source(sampler, sampler.data_source, num_samples), num_samples, False, seed)
    if kind is RandomSampler:
        return _read_random(sampler, seed, num_samples)
    if kind is WeightedRandomSampler:
        draws = {"num_draws": sampler.num_samples, "replacement": sampler.replacement}
        return {"weights": sampler.weights.numpy(), **draws}
    if kind is SubsetRandomSampler:
        return {"sampler": _subset_order(sampler.indices, seed), "num_draws": len(sampler.indices)}
    order = SamplerOrder(sampler, seed)
    return {"sampler": order, "num_draws": len(order)}


def _read_random(sampler: RandomSampler, seed: int, num_samples: int) -> dict[str, Any]:
    num_first, num_draws = _count_source(sampler, sampler.data_source, num_samples), sampler.num_samples
    if not sampler.replacement and num_draws == num_first:
        return _order_first(num_first, num_samples, True, seed)
    if not sampler.replacement and num_draws > num_first:
        raise DataError(
            _DID,
            found=f"its RandomSampler draws {num_draws} of {num_first} samples without replacement",
            fix="Let an epoch have each sample once, and train for more epochs.",
        )
    weights = (np.arange(num_samples) < num_first).astype(np.float64)
    return {"weights": weights, "num_draws": num_draws, "replacement": sampler.replacement}


def _order_first(num_first: int, num_samples: int, shuffle: bool, seed: int) -> dict[str, Any]:
    """Return the arguments of `Plan` for the first `num_first` of `num_samples` samples, each once."""
    if num_first == num_samples:
        return {"shuffle": shuffle}
    if shuffle:
        return {"sampler": _subset_order(range(num_first), seed), "num_draws": num_first}
    return {"sampler": lambda epoch: np.arange(num_first, dtype=np.int64), "num_draws": num_first}


def _count_source(sampler: Any, source: Any, num_samples: int) -> int:
    """Return the number of samples that `sampler` takes: the length of the `source` that it was made of."""
    num_first = len(source)
    if num_first > num_samples:
        raise DataError(
            _DID,
            found=f"its {type(sampler).__name__} has {num_first} samples, and its dataset {num_samples}",
            fix="Create the sampler from the dataset that the loader reads.",
        )
    return num_first


def _subset_order(indices: Any, seed: int) -> Callable[[int], NDArray[np.int64]]:
    numbers = np.asarray(list(indices), dtype=np.int64)
    return lambda epoch: numbers[draw_permutation(len(numbers), seed, epoch)]


def _is_divided(sampler: Any) -> bool:
    """True if `sampler` divides samples among ranks: it has attributes like those of torch's DistributedSampler."""
    for one in (sampler, getattr(sampler, "sampler", None)):
        sizes = [name for name in ("num_replicas", "world_size") if isinstance(getattr(one, name, None), int)]
        if sizes and isinstance(getattr(one, "rank", None), int):
            return True
    return False


class SamplerOrder:
    """The order of `sampler` in an epoch, with global random state seeded from seed and epoch.

    Calls its `set_epoch` if it has one. Raises `DataError` if it returns different samples when it is iterated again.
    """

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        first, second = (as_order(list_sampler(sampler, seed, 0)) for _ in range(2))
        refuse_unequal(sampler, bool(np.array_equal(first, second)))
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
                fix="Let every epoch have as many samples, or give a `batch_sampler`.",
            )
        return order


class BatchSamplerOrder:
    """The global batches of a user's `batch_sampler`, of any sizes; each is divided among the ranks.

    With `are_divided`, they are this rank's own batches, which are not divided further.
    """

    has_repeats = False

    def __init__(self, sampler: Iterable[Any], *, world_size: int, seed: int, are_divided: bool) -> None:
        self.seed = seed
        self._sampler = sampler
        self._division = Division.of(1 if are_divided else world_size)
        first, second = list_sampler(sampler, seed, 0), list_sampler(sampler, seed, 0)
        refuse_unequal(sampler, [[*batch] for batch in first] == [[*batch] for batch in second])
        self.num_batches = len(first)
        batches = [] if are_divided else [*map(as_order, first)]
        self.fingerprint = digest(seed, *(() if are_divided else self._division.edges), *batches)
        """A hash of what must be equal on all ranks: the first epoch, unless each rank has its own batches."""
        self.batches_fingerprint = digest(seed, world_size) if are_divided else digest(seed, *batches)
        """A hash of what determines the global batches; includes the world size if they are divided already."""

    def epoch(self, epoch: int) -> Epoch:
        """Return the batches of `epoch`, whose number may differ between epochs."""
        batches = [as_order(batch) for batch in list_sampler(self._sampler, self.seed, epoch)]
        order = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
        order.flags.writeable = False
        return Epoch(order, [*accumulate((len(batch) for batch in batches), initial=0)], self._division)


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
            found=f"it yields {values[0]!r}, which is not a sample index",
            fix="Let it yield integers from 0 to `len(dataset) - 1`.",
        )
    return order.astype(np.int64)


def refuse_unequal(sampler: Any, is_same: bool) -> None:
    """Raise `DataError` unless `is_same`: ranks that iterate separately would get different samples."""
    if not is_same:
        raise DataError(
            f"taking the order of {type(sampler).__name__}",
            found="it yields different samples each time it is iterated in the same epoch",
            fix="Give it a `set_epoch` that determines its order, or let it draw from the global random state.",
        )
