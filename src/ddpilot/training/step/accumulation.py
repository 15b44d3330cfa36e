# SPDX-License-Identifier: Apache-2.0
"""`Accumulation`, the context of `Loop.accumulate` around one batch, and the schedule of batches per update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import nn

from ddpilot.errors import DdpilotError, LoopError
from ddpilot.group.device import is_out_of_memory
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batch_groups import CurrentBatch
from ddpilot.training.coordination.out_of_memory import explain_out_of_memory
from ddpilot.training.models.strategy import strategy_of
from ddpilot.training.notices import locate
from ddpilot.training.options import Interval, Unit
from ddpilot.training.step.precision import Precision
from ddpilot.training.step.update import UpdateState


@dataclass(eq=False)
class Accumulation:
    """The context manager of `Loop.accumulate`.

    It enters `no_sync()` and autocast where needed, and adds rank, batch and cause to errors raised inside.
    A class, because a generator-based context manager would cost several times as much per batch.
    """

    models: tuple[nn.Module, ...]
    updates: UpdateState
    precision: Precision
    group: GroupLike
    sharing: tuple[int, ...]
    """The other ranks on this rank's device."""
    _outside: tuple[nn.Module, ...] = ()
    _stack: ExitStack | None = None

    def __enter__(self) -> None:
        self._outside, self.updates.accumulating = self.updates.accumulating, self.models
        if self.updates.is_update and not self.precision.is_mixed:
            return
        self._stack = ExitStack()
        if not self.updates.is_update:
            for model in self.models:
                self._stack.enter_context(strategy_of(model).without_reduction())
        self._stack.enter_context(self.precision.autocast())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.updates.accumulating = self._outside
        if self._stack is not None:
            self._stack.close()
        try:
            if error is None and self.updates.is_update:
                self.updates.bypasses.check_all(self.models)
            elif error is not None and not isinstance(error, DdpilotError):
                self._explain(error, self.updates.batch)
        except DdpilotError as found:
            locate(found, self.group.rank, self.updates.batch)
            raise

    def _explain(self, error: BaseException, batch: CurrentBatch | None) -> None:
        self.updates.reducers.explain(error)
        if is_out_of_memory(error):
            raise explain_out_of_memory(error, self.group, self.sharing, batch) from error
        if isinstance(error, RuntimeError | ValueError | IndexError) and batch is not None and batch.lacks_samples:
            raise _empty_forward_failed(batch, self.group, error) from error


def _empty_forward_failed(batch: CurrentBatch, group: GroupLike, error: Exception) -> LoopError:
    return LoopError(
        f"training on batch {batch.index} of epoch {batch.epoch}",
        found=f"it has {batch.global_count} samples for {group.world_size} ranks, none of them on this rank, and "
        f"the computation fails for zero rows ({error})",
        fix="Write x.flatten(1) for x.view(len(x), -1); or use drop_last=True or a different global_batch_size.",
    )


Accumulate = int | Mapping[int | str, int] | Callable[[int, int], int]
"""Batches per update: a number; {0: 1, 5: 4} by epoch or {0: 1, "500 updates": 4}; or a function of (epoch, update)."""


@dataclass(frozen=True)
class AccumulationSchedule:
    """Batches per update at a position of the training, the same on every rank and after a resume."""

    steps: tuple[tuple[int, int], ...] = ()
    """Pairs of a number of epochs or updates, from which on it holds, and a number of batches; ascending."""
    unit: Unit = "epochs"
    """What `steps` count."""
    function: Callable[[int, int], int] | None = None
    """In place of `steps`: returns the number for the current epoch and the number of updates so far."""

    @classmethod
    def parse(cls, given: Any, did: str) -> AccumulationSchedule:
        """Parse the `accumulate` of a Loop or Trainer. Raises LoopError for numbers of batches below 1, and others."""
        if isinstance(given, Mapping) and given:
            return cls._of_mapping(given, did)
        if callable(given):
            return cls(function=given)
        if not _is_size(given):
            raise LoopError(did, found=f"`accumulate` is {given!r}", fix="Pass 1 or more batches.")
        return cls(((0, int(given)),))

    @classmethod
    def _of_mapping(cls, given: Mapping[Any, Any], did: str) -> AccumulationSchedule:
        steps: dict[int, int] = {}
        units: set[Unit] = set()
        for key, size in given.items():
            if not _is_size(size):
                found = f"`accumulate` has {size!r} batches from {key!r} on"
                raise LoopError(did, found=found, fix="Pass 1 or more batches.")
            first = 0
            if key not in (0, "0 updates", "0 epochs"):
                begin = Interval.parse(key, did=did, name="accumulate", unit="epochs")
                first = begin.count
                units.add(begin.unit)
            elif isinstance(key, str):
                units.add("updates" if key == "0 updates" else "epochs")
            if first in steps:
                raise LoopError(did, found=f"`accumulate` has {key!r} twice", fix="Give it once.")
            steps[first] = int(size)
        if len(units) > 1:
            found = f"`accumulate` counts epochs and updates: {dict(given)!r}"
            raise LoopError(did, found=found, fix='Use one of the two: {0: 1, "500 updates": 4}, or a function.')
        steps.setdefault(0, 1)
        return cls(tuple(sorted(steps.items())), units.pop() if units else "epochs")

    @property
    def constant(self) -> int | None:
        """The number of batches if it never changes."""
        return self.steps[0][1] if len(self.steps) == 1 else None

    @property
    def largest(self) -> int:
        """The largest number of batches; of a function, which is not known before, 1."""
        return max((size for _, size in self.steps), default=1)

    @property
    def saved(self) -> int | str | None:
        """The value that a checkpoint stores and a resumed training is compared with; None for a function."""
        if self.function is not None:
            return None
        if self.constant is not None:
            return self.constant
        return f"{', '.join(f'{size} from {first}' for first, size in self.steps)} {self.unit}"

    def size_at(self, epoch: int, update: int) -> int:
        """Return the batches of the update that begins in `epoch` after `update` updates. Raises LoopError."""
        if self.function is None:
            now = update if self.unit == "updates" else epoch
            return next(size for first, size in reversed(self.steps) if first <= now)
        size = self.function(epoch, update)
        if not _is_size(size):
            found = f"`accumulate` returned {size!r} for epoch {epoch} and update {update}"
            raise LoopError("reading the batches of an update", found=found, fix="Return 1 or more batches.")
        return int(size)


def _is_size(given: object) -> bool:
    return hasattr(given, "__index__") and not isinstance(given, bool) and int(given) >= 1
