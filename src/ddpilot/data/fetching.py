# SPDX-License-Identifier: Apache-2.0
"""Read, seed and collate samples, in a worker or in the rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from ddpilot.data.batches import without_rows
from ddpilot.data.rows import find_rows
from ddpilot.data.sample_seeds import mix_seed, random_apart, seed_random
from ddpilot.errors import DataError

Collate = Callable[[list[Any]], Any]


class Order(NamedTuple):
    """One piece to read."""

    epoch: int
    batch: int
    sample_ids: NDArray[np.int64]
    """At least one index; if the piece is empty, that of a sample from which an empty batch is made."""

    draws: list[int] | None
    """Which draw of the epoch each sample is, if samples can repeat; otherwise None."""

    is_empty: bool


@dataclass(frozen=True)
class Failure:
    """An exception raised by the dataset or `collate_fn`, sent from a worker to its rank."""

    doing: str
    advice: str
    error: BaseException | ExceptionWrapper

    def throw(self, rank: int) -> None:
        """Raise `DataError` with the original exception as its cause."""
        try:
            if isinstance(self.error, BaseException):
                raise self.error
            self.error.reraise()  # type: ignore[no-untyped-call]
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise DataError(self.doing, found=found, fix=self.advice, rank=rank) from error


def catch_failure(doing: str, advice: str, error: Exception) -> Failure:
    """Return a `Failure` for an exception that is being handled; in a worker, one that can be pickled."""
    if get_worker_info() is None:
        return Failure(doing, advice, error)
    wrapped = ExceptionWrapper(where="in a worker of the loader")  # type: ignore[no-untyped-call]
    try:
        pickle.loads(pickle.dumps(wrapped))
    except Exception:  # noqa: BLE001 - such as an exception class that is local to a function
        wrapped.exc_type = RuntimeError
    return Failure(doing, advice, wrapped)


def draws_randomly(dataset: Any, collate: Collate) -> bool:
    """True unless `dataset` is known to return stored values unchanged and `collate` only stacks them.

    Subclasses are not known: their own `__getitem__` may augment.
    """
    if type(dataset) is Subset:
        return draws_randomly(dataset.dataset, collate)
    if type(dataset) is ConcatDataset:
        return any(draws_randomly(part, collate) for part in dataset.datasets)
    plain = (TensorDataset, torch.Tensor, np.ndarray, list, tuple, range)
    return type(dataset) not in plain or collate is not default_collate


class PieceReader(Dataset[Any]):
    """A dataset of whole pieces: `reader.__getitems__([order])` is the collated piece, or a `Failure`.

    With `seeded`, random state is a function of (seed, epoch, sample index) while a sample is read, and of (seed,
    epoch, batch) while the piece is collated, in any rank and worker; the previous state of the rank is restored
    afterwards. Seeding costs more than reading a plain sample, but no sample of a dataset that may draw can be left
    out: the dataset may keep what it draws, so that reading the sample again with a seed would come too late.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int, seeded: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seeded = seeded and draws_randomly(dataset, collate)
        self._seeds_samples = seeded and draws_randomly(dataset, default_collate)
        self._seed = seed
        self._epoch = -1
        self._rows = None if self.seeded else find_rows(dataset, collate)

    def __getitems__(self, orders: Sequence[Order]) -> Any:
        (order,) = orders
        self._tell_epoch(order.epoch)
        with random_apart(self.seeded):
            return self._make(order)

    def _tell_epoch(self, epoch: int) -> None:
        if epoch != self._epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._epoch = epoch

    def _make(self, order: Order) -> Any:
        if self._rows is not None and not order.is_empty:
            return self._rows(order.sample_ids)
        samples = self._read(order)
        if isinstance(samples, Failure):
            return samples
        if self.seeded:
            self._seed_for(order.epoch, order.batch, 1)
        try:
            data = self.collate(samples)
            return without_rows(data, self.collate([*samples, *samples])) if order.is_empty else data
        except Exception as error:  # noqa: BLE001 - the rank raises it, with its number
            doing = f"collating samples {order.sample_ids.tolist()} (batch {order.batch} of epoch {order.epoch})"
            return catch_failure(doing, "Call `collate_fn` with these samples, without workers.", error)

    def _read(self, order: Order) -> list[Any] | Failure:
        place, numbers = 0, order.sample_ids.tolist()
        try:
            if not self._seeds_samples and (many := getattr(self.dataset, "__getitems__", None)):
                return list(many(numbers))
            samples = []
            for place, number in enumerate(numbers):
                if self._seeds_samples:
                    draw = 0 if order.draws is None else order.draws[place] + 1
                    self._seed_for(order.epoch, number, draw, 0)
                samples.append(self.dataset[number])
        except Exception as error:  # noqa: BLE001 - the rank raises it, with its number
            number = numbers[place]
            doing = f"reading sample {number} (batch {order.batch} of epoch {order.epoch})"
            return catch_failure(doing, f"Look at `dataset[{number}]`.", error)
        return samples

    def _seed_for(self, *parts: int) -> None:
        seed_random(mix_seed(self._seed, *parts))
