# SPDX-License-Identifier: Apache-2.0
"""The rank's position in training (loader, pass, batch), shared by the parts of the data probe."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.notes import BatchKey, PassKey, Site
from ddpilot.guard.probes.data.samplers import Sketch
from ddpilot.guard.probes.process_groups import describe_group


@dataclass(eq=False)
class Pass:
    """One iteration over a loader."""

    loader: int
    """Number of the loader: a hash of the line that first read it and a count of loaders read there."""
    number: int
    """Counts the loader's passes from 1."""
    length: int | None
    num_workers: int
    site: Site
    sketch: Sketch | None
    """None if contents are not compared."""
    num_batches: int = 0
    num_samples: int = 0
    sizes: list[int] = field(default_factory=list)
    """Rows per batch, with runs of equal numbers shortened to one; the first three runs."""
    num_evaluating: int = 0
    """Number of batches fetched for evaluation."""
    trained: set[int] = field(default_factory=set)
    """Numbers of the models trained with its batches."""
    requested: deque[Any] = field(default_factory=deque)
    """Sample indices of batches that were requested and not returned yet."""
    order: list[int] | None = field(default_factory=list)
    """The first sample indices requested; None once they are noted."""

    @property
    def key(self) -> PassKey:
        """Fields that all notes on it have."""
        return {"loader": self.loader, "pass": self.number}


@dataclass
class LoadedBatch:
    """A batch returned by a loader."""

    of: Pass
    batch: int
    """Counts from 1."""
    indices: tuple[int, ...]
    """The first sample indices; empty if there are none."""
    storages: Mapping[int, StorageWeakRef]
    """Storages of its first tensors, by address. A freed tensor's address may be reused."""

    @property
    def key(self) -> BatchKey:
        """Fields of notes on a forward that trains with it."""
        return {**self.of.key, "batch": self.batch}


class TrainedModel:
    """The `number`-th DDP model of this process, to which it keeps no reference."""

    def __init__(self, model: DistributedDataParallel, *, number: int, is_prepared: bool) -> None:
        self.find: Callable[[], Any] = ref(model)
        """Returns the model, or None once it has been freed."""
        self.number = number
        self.group = describe_group(model.process_group)
        self.is_prepared = is_prepared
        """True if wrapped by a `Loop`, which warns about small batches for BatchNorm itself."""
        self.forwards = 0
        self.ended: tuple[int, torch.Tensor] = (0, torch.empty(0))
        """The last forward that was observed, and the state of the CPU generator after it."""
        self.used: LoadedBatch | None = None
        """The batch of that forward."""
        self.rows: list[int] = []


@dataclass(eq=False)
class Position:
    """The current position in training."""

    models: dict[int, TrainedModel] = field(default_factory=dict)
    """This process's DDP models by id, in order of construction. Not a WeakKeyDictionary: it does lookups in Python,
    which would cost time in every step."""
    fetching: Pass | None = None
    """Pass of the batch that is being fetched in this process; None otherwise."""
    fetched: dict[int, Pass] = field(default_factory=dict)
    """Passes, by loader, that returned a training batch since the last forward."""
    batches: deque[LoadedBatch] = field(default_factory=lambda: deque(maxlen=4))
    """The newest batches."""
    used: LoadedBatch | None = None
    """The batch of the last forward in training."""
    evaluated: Pass | None = None
    """The last pass if it was an evaluation that has ended and no training followed; otherwise None."""

    def is_evaluating(self) -> bool:
        """True if this process has DDP models and all are in eval mode."""
        models = [model for known in self.models.values() if (model := known.find()) is not None]
        # Same as `model.module`, at a fraction of the cost of nn.Module's attribute access.
        return bool(models) and not any(one.training and one._modules["module"].training for one in models)

    def find_batch(self, pointers: frozenset[int]) -> LoadedBatch | None:
        """Return the newest batch that has one of these tensors, or else the newest one."""
        for batch in reversed(self.batches):
            for address, storage in batch.storages.items():
                if address in pointers and not storage.expired():  # type: ignore[no-untyped-call]
                    return batch
        return self.batches[-1] if self.batches else None


def is_due(number: int) -> bool:
    """True for the first 8 numbers (from 1), powers of two, and multiples of 1024."""
    return number <= 8 or number & (number - 1) == 0 or number % 1024 == 0
