# SPDX-License-Identifier: Apache-2.0
"""Record which samples a rank trains on: the batches of DataLoaders and of loops."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import dataloader as torch_loader

from ddpilot.data.batches import LocalBatch, observers
from ddpilot.data.workers import PieceReader
from ddpilot.diagnose.updates.record import Batch
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.tensors import fingerprint_rows, num_rows_of

_READS_AHEAD = os.path.join("accelerate", "data_loader.py")
"""File of loaders that read one batch ahead of the training."""
_OF_LOOP = -1
"""Number of the loader of batches that a `Loop` reads."""


class BatchObserver:
    """The part of the probe that sees batches. `read`: called when one has been read, before it is used."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read
        self.samplers: list[str] = []
        """Class name of the sampler of each DataLoader."""
        self._batches: list[Batch] = []
        self._loaders: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._requested: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self._waiting: WeakKeyDictionary[Any, Batch] = WeakKeyDictionary()

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """Start observing; returns the functions that stop it."""
        kind = torch_loader._BaseDataLoaderIter
        observer = notes.safely(self._loop_batch_read)
        observers.append(observer)
        return [
            notes.around(kind, "_next_index", returned=self._index_requested),
            notes.around(kind, "__next__", returned=self._batch_returned, raised=self._loader_ended),
            lambda: observers.remove(observer),
        ]

    def take(self) -> tuple[Batch, ...]:
        """Return the batches since the last call."""
        batches, self._batches = self._batches, []
        return tuple(batches)

    def _loop_batch_read(self, batch: LocalBatch, *_: int) -> None:
        self._read()
        if torch.is_grad_enabled() and batch.count:
            indices = tuple(map(int, batch.sample_ids)) if (batch.sample_ids >= 0).all() else ()
            checksums = _checksums_of(batch.data, batch.count)
            self._batches.append(Batch(loader=_OF_LOOP, indices=indices, checksums=checksums))

    def _index_requested(self, _: None, index: Any, iterator: Any) -> None:
        self._requested.setdefault(iterator, []).append(index)

    def _batch_returned(self, _: None, data: Any, iterator: Any) -> None:
        self._read()
        requested = self._requested.get(iterator)
        index = requested.pop(0) if requested else None
        if not torch.is_grad_enabled() or isinstance(iterator._dataset, PieceReader):  # the latter is of a `Loop`
            return
        # An iterator is not told its loader, but they share the dataset's batch sampler.
        sampler = iterator._index_sampler
        number = self._loaders.get(sampler)
        if number is None:
            number = self._loaders[sampler] = len(self._loaders)
            self.samplers.append(type(getattr(sampler, "sampler", sampler)).__name__)
        indices = tuple(index) if isinstance(index, list | tuple) and all(type(one) is int for one in index) else ()
        batch = Batch(loader=number, indices=indices, checksums=_checksums_of(data, num_rows_of(data) or 0))
        if _is_ahead():
            self._use_waiting(iterator)
            self._waiting[iterator] = batch
        else:
            self._batches.append(batch)

    def _loader_ended(self, _: None, iterator: Any) -> None:
        self._use_waiting(iterator)

    def _use_waiting(self, iterator: Any) -> None:
        """Count the batch that a library has kept back while it read the next one."""
        if (batch := self._waiting.pop(iterator, None)) is not None:
            self._batches.append(batch)


def _checksums_of(data: Any, num_rows: int) -> tuple[int, ...]:
    rows = fingerprint_rows(data, num_rows, list(range(num_rows)))
    return tuple(rows[row] for row in sorted(rows))


def _is_ahead() -> bool:
    """True if a library reads the batch, which passes on the one before it."""
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_code.co_name == "__iter__" and frame.f_code.co_filename.endswith(_READS_AHEAD):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
