# SPDX-License-Identifier: Apache-2.0
"""Read with torch's DataLoader, and explain errors of its workers."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ddpilot.errors import DataError


class Workers:
    """A torch DataLoader that calls `reader` with each of `orders`, in that order. `options`: those of DataLoader."""

    def __init__(self, reader: Dataset[Any], orders: Sampler[Any], rank: int, options: Mapping[str, Any]) -> None:
        # A separate generator: starting workers must not draw from the random state that the model uses.
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            reader, batch_sampler=orders, collate_fn=_as_it_is, generator=self._generator, **options
        )
        self._reader: Any = reader
        self._orders = orders
        self._rank = rank
        self._number = 0

    @property
    def loader(self) -> DataLoader[Any]:
        """The DataLoader."""
        return self._loader

    def read(self, seed: int) -> Iterator[Any]:
        """Yield the reader's result for each order. `seed`: for the base seed of the workers' own random state.

        Raises `DataError` if the dataset has to be pickled for its workers and cannot be, or if persistent workers have
        started a different epoch since.
        """
        self._number += 1
        self._generator.manual_seed(seed)
        if not self._loader.num_workers and not self._loader.pin_memory:
            # Same results as torch's DataLoader, without its overhead per batch.
            return map(self._reader.__getitems__, self._orders)
        return self._go_on(self._start(), self._number)

    def _go_on(self, results: Iterator[Any], number: int) -> Iterator[Any]:
        num_read = 0
        while True:
            if self._loader.persistent_workers and number != self._number:
                raise DataError(
                    "reading on in an epoch",
                    found="another one was begun since, and `persistent_workers` read one at a time",
                    fix="Make a second loader, or leave `persistent_workers` out.",
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
            f"reading batch {num_read} of this pass with {self._loader.num_workers} workers",
            found=f"{error}",
            fix="The kernel's OOM killer is the usual cause: use fewer workers, a smaller `prefetch_factor`, and "
            "arrays or memory maps instead of lists of objects; with num_workers=0 a crash shows its line (DDP607: "
            "`ddpilot explain DDP607`).",
            rank=self._rank,
        )

    def _start(self) -> Iterator[Any]:
        try:
            return iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            context = self._loader.multiprocessing_context
            method = multiprocessing.get_start_method() if context is None else str(context.get_start_method())
            if not self._loader.num_workers or method == "fork":
                raise
            raise DataError(
                f"starting {self._loader.num_workers} workers by `{method}`, which pickles dataset and functions",
                found=f"{type(error).__name__}: {error}",
                fix="Define them at the top of a module, without lambdas, or use `multiprocessing_context='fork'` or "
                "`num_workers=0`.",
                rank=self._rank,
            ) from error


def _as_it_is(data: Any) -> Any:
    return data
