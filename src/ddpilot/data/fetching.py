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
from ddpilot.data.seeding import RandomState, mix_seed, seed_random
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
    """True unless the dataset is known to return stored values unchanged, so that reading may use random state."""
    if isinstance(dataset, Subset):
        return draws_randomly(dataset.dataset, collate)
    if isinstance(dataset, ConcatDataset):
        return any(draws_randomly(part, collate) for part in dataset.datasets)
    plain = (TensorDataset, torch.Tensor, np.ndarray, list, tuple, range)
    return type(dataset) not in plain or collate is not default_collate


class Piece(NamedTuple):
    """The result of one order."""

    data: Any
    """Collated data, or a `Failure`."""

    has_drawn: bool
    """True if reading used random state."""


class PieceReader(Dataset[Any]):
    """A dataset of whole pieces: `reader.__getitems__([order])` is the collated piece.

    With `seeded`, random state is a function of (seed, epoch, sample index) while a sample is read, and of (seed,
    epoch, batch) while the piece is collated, in any rank and worker; the previous state is restored afterwards.

    Seeding costs more than reading a plain sample. The first piece is read with seeds, as a dataset may cache what it
    draws. If this piece used no random state, the following ones are read without seeds until one has used it; that
    piece is then read again with seeds.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int, seeded: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seeded = seeded
        self.has_drawn = False
        self.has_looked = False
        """True once a first piece was read with seeds."""
        self._seed = seed
        self._after_seed: RandomState | None = None
        self._epoch = -1
        self._rows = None if seeded else find_rows(dataset, collate)

    def __getitems__(self, orders: Sequence[Order]) -> Piece:
        (order,) = orders
        self._tell_epoch(order.epoch)
        if not self.seeded:
            return Piece(self._make(order, seeded=False), False)
        before = RandomState()
        try:
            if self.has_looked and not self.has_drawn:
                data = self._make(order, seeded=False)
                if before.is_current():
                    return Piece(data, False)
                self.has_drawn = True
            data = self._make(order, seeded=True)
            self.has_looked, self._after_seed = True, None
        except BaseException:  # also for Ctrl-C, after which the loop may continue
            before.restore()
            raise
        before.restore()
        return Piece(data, self.has_drawn)

    def _tell_epoch(self, epoch: int) -> None:
        if epoch != self._epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._epoch = epoch

    def _make(self, order: Order, *, seeded: bool) -> Any:
        if self._rows is not None and not order.is_empty:
            return self._rows(order.sample_ids)
        samples = self._read(order, seeded)
        if isinstance(samples, Failure):
            return samples
        if seeded:
            self._seed_for(order.epoch, order.batch, 1)
        try:
            data = self.collate(samples)
            self._look()
            return without_rows(data, self.collate([*samples, *samples])) if order.is_empty else data
        except Exception as error:  # noqa: BLE001 - the rank raises it, with its number
            doing = f"collating samples {order.sample_ids.tolist()} (batch {order.batch} of epoch {order.epoch})"
            return catch_failure(doing, "Call `collate_fn` with these samples, without workers.", error)

    def _read(self, order: Order, seeded: bool) -> list[Any] | Failure:
        place, numbers = 0, order.sample_ids.tolist()
        try:
            if not self.seeded and (many := getattr(self.dataset, "__getitems__", None)):
                return list(many(numbers))
            samples = []
            for place, number in enumerate(numbers):
                if seeded:
                    draw = 0 if order.draws is None else order.draws[place] + 1
                    self._seed_for(order.epoch, number, draw, 0)
                samples.append(self.dataset[number])
                self._look()
        except Exception as error:  # noqa: BLE001 - the rank raises it, with its number
            number = numbers[place]
            doing = f"reading sample {number} (batch {order.batch} of epoch {order.epoch})"
            return catch_failure(doing, f"Look at `dataset[{number}]`.", error)
        return samples

    def _seed_for(self, *parts: int) -> None:
        seed_random(mix_seed(self._seed, *parts))
        self._after_seed = None if self.has_looked or self.has_drawn else RandomState()

    def _look(self) -> None:
        """While the first piece is read, detect whether random state was used since the last seed."""
        if self._after_seed is not None and not self.has_drawn:
            self.has_drawn = not self._after_seed.is_current()
