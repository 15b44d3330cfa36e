# SPDX-License-Identifier: Apache-2.0
"""`Accumulation`: the context of `Loop.accumulate` around the forward and backward pass of one batch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from torch import nn

from ddpilot.errors import DdpilotError, LoopError
from ddpilot.group.device import is_out_of_memory
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batches import CurrentBatch
from ddpilot.training.coordination.out_of_memory import explain_out_of_memory
from ddpilot.training.models.strategy import strategy_of
from ddpilot.training.notices import locate
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
