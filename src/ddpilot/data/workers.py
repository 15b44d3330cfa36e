# SPDX-License-Identifier: Apache-2.0
"""Read, seed and collate samples with torch's DataLoader workers or in the rank, and explain their errors."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from ddpilot.data.local_batch import mix_seed, random_apart, seed_random
from ddpilot.data.nested import without_rows
from ddpilot.data.options import Collate
from ddpilot.errors import DataError


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
        if order.epoch != self._epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(order.epoch)
        self._epoch = order.epoch
        if not self.seeded:
            return self._make(order)
        with random_apart():
            return self._make(order)

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
        index, numbers = 0, order.sample_ids.tolist()
        try:
            if not self._seeds_samples and (many := getattr(self.dataset, "__getitems__", None)):
                return list(many(numbers))
            samples = []
            for index, number in enumerate(numbers):
                if self._seeds_samples:
                    draw = 0 if order.draws is None else order.draws[index] + 1
                    self._seed_for(order.epoch, number, draw, 0)
                samples.append(self.dataset[number])
        except Exception as error:  # noqa: BLE001 - the rank raises it, with its number
            number = numbers[index]
            doing = f"reading sample {number} (batch {order.batch} of epoch {order.epoch})"
            return catch_failure(doing, f"Inspect `dataset[{number}]`.", error)
        return samples

    def _seed_for(self, *parts: int) -> None:
        seed_random(mix_seed(self._seed, *parts))


Rows = Callable[[NDArray[np.int64]], list[torch.Tensor]]


def find_rows(dataset: Any, collate: Callable[[list[Any]], Any]) -> Rows | None:
    """Return a function from sample indices to the batch that `collate` would make, bit for bit; None if unknown."""
    if collate is not default_collate:
        return None
    if type(dataset) is Subset and (rows := find_rows(dataset.dataset, collate)) is not None:
        inner, indices = rows, dataset.indices
        return lambda numbers: inner(np.array([indices[number] for number in numbers.tolist()], dtype=np.int64))
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None

    def take(numbers: NDArray[np.int64]) -> list[torch.Tensor]:
        index = torch.from_numpy(numbers.copy())  # torch warns about read-only arrays
        return [tensor.index_select(0, index) for tensor in dataset.tensors]

    return take


def _is_plain(tensor: torch.Tensor) -> bool:
    on_host = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return on_host and not tensor.is_quantized and not tensor.requires_grad


class _Orders(Sampler[Any]):
    """Batch sampler that torch's DataLoader iterates when reading starts."""

    orders: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.orders


class Workers:
    """A torch DataLoader that calls `reader` with lists of one order. `options`: those of DataLoader."""

    def __init__(self, reader: Dataset[Any], rank: int, options: Mapping[str, Any]) -> None:
        # A separate generator: starting workers must not draw from the random state that the model uses.
        self._generator = torch.Generator()
        self._orders = _Orders()
        self.loader: DataLoader[Any] = DataLoader(
            reader, batch_sampler=self._orders, collate_fn=_identity, generator=self._generator, **options
        )
        self._reader: Any = reader
        self._rank = rank
        self._number = 0

    def read(self, orders: Iterator[list[Any]], seed: int) -> Iterator[Any]:
        """Yield the reader's result for each of `orders`, in that order; each is a list of one.

        `seed`: for the base seed of the workers' own random state. Raises `DataError` for a `Failure`, if the dataset
        has to be pickled for its workers and cannot be, or if persistent workers have started a different epoch since.
        """
        self._number += 1
        self._generator.manual_seed(seed)
        self._orders.orders = orders
        if self.loader.num_workers or self.loader.pin_memory:
            results: Iterator[Any] = self._read_pass(self._start(), self._number)
        else:  # same results as torch's DataLoader, without its overhead per batch
            results = map(self._reader.__getitems__, self._orders)
        for result in results:
            if isinstance(result, Failure):
                if isinstance(results, Generator):  # ends the workers; the garbage collector would take seconds
                    results.close()
                result.throw(self._rank)
            yield result

    def _read_pass(self, results: Iterator[Any], number: int) -> Iterator[Any]:
        num_read = 0
        while True:
            if self.loader.persistent_workers and number != self._number:
                raise DataError(
                    "continuing an epoch",
                    found="a later epoch was started, and `persistent_workers` read one epoch at a time",
                    fix="Create a second loader, or leave `persistent_workers` out.",
                    rank=self._rank,
                )
            try:
                result = next(results)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise self._worker_died(error, num_read) from error
            num_read += 1
            yield result

    def _worker_died(self, error: RuntimeError, num_read: int) -> DataError:
        # Exceptions of the dataset arrive as a `Failure`, so this is a process that was ended by a signal.
        return DataError(
            f"reading batch {num_read} of this pass with {self.loader.num_workers} workers",
            found=f"{error}",
            fix="The kernel's OOM killer is the usual cause: use fewer workers, a smaller `prefetch_factor`, and "
            "arrays or memory maps instead of lists of objects; with num_workers=0 a crash shows its line (DDP607: "
            "`ddpilot explain DDP607`).",
            rank=self._rank,
        )

    def _start(self) -> Iterator[Any]:
        try:
            return iter(self.loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            context = self.loader.multiprocessing_context
            method = multiprocessing.get_start_method() if context is None else str(context.get_start_method())
            if not self.loader.num_workers or method == "fork":
                raise
            raise DataError(
                f"starting {self.loader.num_workers} workers by `{method}`, which pickles dataset and functions",
                found=f"{type(error).__name__}: {error}",
                fix="Define them at the top of a module, without lambdas, or use `multiprocessing_context='fork'` or "
                "`num_workers=0`.",
                rank=self._rank,
            ) from error


def _identity(data: Any) -> Any:
    return data
