# SPDX-License-Identifier: Apache-2.0
"""Observe what DataLoaders yield, without consuming it: passes, fingerprints of batches, sample indices, order."""

from __future__ import annotations

import os
import sys
import zlib
from array import array
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import dataloader as torch_loader

from ddpilot.guard.notes import BatchNote, OrderNote, PassEndNote, ShardNote, Site
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.data.position import LoadedBatch, Pass, Position, is_due
from ddpilot.guard.probes.data.random_draws import DrawObserver
from ddpilot.guard.probes.data.samplers import Sketch, describe_loader, is_looked_at, may_repeat
from ddpilot.guard.probes.tensors import fingerprint, num_rows_of, tensors_in

_NUM_ORDERED = 16
_MAX_REQUESTED = 4096
_NUM_SKETCHED_PASSES = 2
_NUM_NAMED_SAMPLES = 8
_MAX_SIZES = 3


class LoaderObserver:
    """The part of the data probe that follows the iterators of DataLoaders."""

    def __init__(self, notes: Notes, position: Position, draws: DrawObserver) -> None:
        self._notes = notes
        self._position = position
        self._draws = draws
        self._loaders: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._num_at: dict[str, int] = {}
        self._num_passes: dict[int, int] = {}
        self._passes: WeakKeyDictionary[Any, Pass] = WeakKeyDictionary()

    def install(self) -> list[Callable[[], None]]:
        kind, notes = torch_loader._BaseDataLoaderIter, self._notes
        return [
            notes.around(kind, "__init__", returned=self._made),
            notes.around(kind, "_reset", returned=self._reset),
            notes.around(kind, "_next_index", returned=self._requested),
            notes.around(kind, "__next__", before=self._fetching, returned=self._returned, raised=self._raised),
        ]

    def _reset(self, _: Any, __: Any, iterator: Any, loader: Any = None, first_iter: bool = False) -> None:
        if not first_iter and loader is not None:
            self._made(None, None, iterator, loader)

    def _made(self, _: Any, __: Any, iterator: Any, loader: Any) -> None:
        self._passes.pop(iterator, None)
        self._position.fetching = None
        if not is_looked_at(loader):
            return
        site = self._notes.site()
        number = self._loaders.get(loader) or self._add_loader(loader, site)
        count = self._num_passes[number] = self._num_passes.get(number, 0) + 1
        note = describe_loader(loader, {"loader": number, "pass": count}, site)
        is_compared = count <= _NUM_SKETCHED_PASSES and note["sampler"] is not None and not may_repeat(loader)
        is_compared = is_compared and getattr(loader, "in_order", True)
        sketch = Sketch(loader.dataset, note["samples"] or 0) if is_compared else None
        found = Pass(number, count, note["length"], loader.num_workers, site, sketch)
        self._passes[iterator] = found
        if found.num_workers:
            self._draws.share(found)
        self._notes.write("loader_pass", note)

    def _add_loader(self, loader: Any, site: Site) -> int:
        # Counted per line: a loader that only some ranks read, for example to evaluate, does not shift the numbers of
        # others.
        line = f"{os.path.basename(site.get('file', ''))}:{site.get('line')}"
        count = self._num_at[line] = self._num_at.get(line, 0) + 1
        number = self._loaders[loader] = zlib.crc32(f"{line} {count}".encode()) + 1
        return number

    def _requested(self, _: Any, index: Any, iterator: Any) -> None:
        found = self._passes.get(iterator)
        if found is None or index is None:
            return
        if len(found.requested) < _MAX_REQUESTED:
            found.requested.append(index)
        if found.order is not None and isinstance(index, list):
            found.order += [one for one in index[:_NUM_ORDERED] if type(one) is int]
            if len(found.order) >= _NUM_ORDERED:
                self._write_order(found)

    def _fetching(self, iterator: Any) -> Pass | None:
        self._position.fetching = self._passes.get(iterator)
        return self._position.fetching

    def _raised(self, found: Pass | None, _: Any) -> None:
        self._position.fetching = None
        if found is not None and isinstance(sys.exc_info()[1], StopIteration):
            self._ended(found)

    def _returned(self, found: Pass | None, data: Any, _: Any) -> None:
        self._position.fetching = None
        if found is None:
            return
        index = found.requested.popleft() if found.requested else None
        found.num_batches += 1
        number = found.num_batches
        is_evaluation = not torch.is_grad_enabled() or self._position.is_evaluating()
        found.num_evaluating += is_evaluation
        # Indices of a stream are None, as many as in a full batch.
        numbers: Any = index if isinstance(index, list | tuple) and index and index[0] is not None else None
        num_rows = len(numbers) if numbers else num_rows_of(data) or 0
        found.num_samples += num_rows
        if (not found.sizes or found.sizes[-1] != num_rows) and len(found.sizes) < _MAX_SIZES:
            found.sizes.append(num_rows)
        if found.num_workers:
            self._draws.collect(found)
        if is_evaluation:
            return
        position = self._position
        position.fetched[found.loader] = found
        position.batches.append(_describe_batch(found, number, index, data))
        if is_due(number) and (seen := fingerprint(data)):
            self._notes.write("batch", BatchNote(**found.key, batch=number, checksum=seen.checksum))
        elif number == 2:
            self._notes.write("batch", BatchNote(**found.key, batch=number, checksum=None))
        if found.sketch is not None and index is not None:
            found.sketch.add(index, data)
            if number >= 4 and number & (number - 1) == 0:
                self._write_shard(found)
        if found.length is not None and number == max(1, found.length - 2):
            self._notes.write("near_end", found.key)

    def _ended(self, found: Pass) -> None:
        self._position.fetched.pop(found.loader, None)  # a later forward trains on a batch of a different pass
        is_evaluation = found.num_batches > 0 and found.num_evaluating == found.num_batches
        if is_evaluation:
            self._position.evaluated = found
        else:
            self._write_order(found)
            self._write_shard(found)
        note = PassEndNote(**found.key, samples=found.num_samples, evaluates=is_evaluation)
        self._notes.write("pass_end", note)

    def _write_order(self, found: Pass) -> None:
        order, found.order = found.order, None
        if order:
            order = order[:_NUM_ORDERED]
            is_sorted = all(a < b for a, b in pairwise(order))
            note = OrderNote(**found.key, order=zlib.crc32(array("q", order)), sorted=is_sorted)
            self._notes.write("order", note)

    def _write_shard(self, found: Pass) -> None:
        if found.sketch is not None and (pairs := found.sketch.pairs()):
            self._notes.write("shard", ShardNote(**found.key, pairs=pairs))


def _describe_batch(found: Pass, number: int, index: Any, data: Any) -> LoadedBatch:
    indices = index[:_NUM_NAMED_SAMPLES] if isinstance(index, list) else ()
    named = tuple(one for one in indices if type(one) is int)
    storages = {
        one.data_ptr(): StorageWeakRef(one.untyped_storage())  # type: ignore[no-untyped-call]
        for one in _first_tensors(data)
    }
    return LoadedBatch(found, number, named, storages)


def pointers_of(data: Any) -> frozenset[int]:
    """Addresses of the first tensors in `data`, by which a batch is recognized."""
    return frozenset(one.data_ptr() for one in _first_tensors(data))


def _first_tensors(data: Any) -> list[torch.Tensor]:
    strided = (one for _, one in tensors_in(data) if type(one) is torch.Tensor and one.layout is torch.strided)
    return list(islice(strided, 4))
