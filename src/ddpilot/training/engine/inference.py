# SPDX-License-Identifier: Apache-2.0
"""`Inference`: evaluate and predict between updates, with weights that are complete, and BatchNorm's statistics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from ddpilot.data.loaders import prepare_data_loader
from ddpilot.errors import LoopError
from ddpilot.training.batches import Loader
from ddpilot.training.engine.parts import LoopParts
from ddpilot.training.evaluation.batch_norm import update_batch_norm
from ddpilot.training.evaluation.evaluate import evaluate, evaluate_step
from ddpilot.training.evaluation.predict import predict


class Inference:
    """Implements `Loop.evaluate`, `Loop.predict` and `Loop.update_batch_norm`."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._group = parts.group

    def evaluate(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        metrics: Mapping[str, Any] | None,
        forward: Callable[[nn.Module, Any], tuple[Any, ...]] | None,
        step: Callable[[nn.Module, Any], Any] | None,
    ) -> dict[str, Any]:
        """Implement `Loop.evaluate`. Collective."""
        if (metrics is None) == (step is None) or (step is not None and forward is not None):
            is_none = metrics is None and step is None
            found = "neither `metrics` nor `step`" if is_none else "`step` next to `metrics` or `forward`"
            raise LoopError("evaluating", found=found, fix="Give `metrics`, with `forward` if needed; or `step` alone.")
        with self._reading():
            if step is not None:
                return evaluate_step(model, self._divided(loader), step, self._group)
            return evaluate(model, self._divided(loader), metrics, self._group, forward)

    def predict(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        to: str | os.PathLike[str] | None,
        on_all_ranks: bool,
        forward: Callable[[nn.Module, Any], Any] | None,
    ) -> Any:
        """Implement `Loop.predict`. Collective."""
        with self._reading():
            divided = self._divided(loader)
            return predict(model, divided, self._group, to=to, on_all_ranks=on_all_ranks, forward=forward)

    def update_batch_norm(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        max_batches: int | None,
        forward: Callable[[nn.Module, Any], Any] | None,
    ) -> None:
        """Implement `Loop.update_batch_norm`. Collective."""
        self._parts.join()
        self._parts.settle_averages()
        epoch = self._parts.position.epoch
        options: dict[str, Any] = {"epoch": epoch, "max_batches": max_batches, "forward": forward}
        with self._parts.precision.autocast():
            update_batch_norm(model, self._divided(loader), self._group, **options)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Complete what is pending, and run the block in the loop's precision, outside of training's time."""
        self._parts.join()
        self._parts.before_read()
        self._parts.checkpointer.report_resumed()
        self._parts.settle_averages()
        with self._parts.precision.autocast(), self._parts.clock.paused():
            yield

    def _divided(self, loader: Loader | DataLoader[Any]) -> Loader:
        if not isinstance(loader, DataLoader):
            return loader
        # The batch size does not affect results here, so its meaning is not reported; ranks may also get no samples.
        rank, world_size, seed = self._group.rank, self._group.world_size, self._parts.seed
        return prepare_data_loader(loader, rank=rank, world_size=world_size, seed=seed, empty_ranks=True)
