# SPDX-License-Identifier: Apache-2.0
"""Backward passes of one update: weighted, accumulated, and synchronised exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import DdpilotError, LoopError
from ddpilot.group.protocol import GroupLike
from ddpilot.training.deciding import Decider, Decision
from ddpilot.training.grouping import CurrentBatch
from ddpilot.training.nonfinite import LossWatch, raise_nonfinite
from ddpilot.training.weighting import CountTotals, backward_weighted


class Updates:
    """The batch that the loop is at, the models that it trains, and the gradients on their way to the next update."""

    def __init__(self, group: GroupLike, decider: Decider, watch: LossWatch | None) -> None:
        self._group = group
        self._decider = decider
        self._watch = watch
        self._accumulating: tuple[nn.Module, ...] = ()
        self._totals: dict[tuple[int, ...], CountTotals] = {}
        self._has_exchanged = False
        self.models: list[nn.Module] = []
        """As `prepare` returned them."""
        self.batch: CurrentBatch | None = None
        """None outside `batches`."""

    @property
    def is_update(self) -> bool:
        """Are the gradients complete after this batch? True outside `batches` too."""
        return self.batch is None or self.batch.is_last

    def enter(self, batch: CurrentBatch) -> None:
        """Go to the next batch."""
        self.batch = batch
        self._has_exchanged = False
        if batch.is_first:
            self._totals.clear()

    @contextmanager
    def accumulate(self, models: tuple[nn.Module, ...]) -> Iterator[None]:
        """Do not synchronise the gradients of `models` in here, except for the last batch of an accumulation group."""
        outside, self._accumulating = self._accumulating, models
        try:
            with ExitStack() as stack:
                for model in models:
                    if not self.is_update and isinstance(model, DistributedDataParallel):
                        stack.enter_context(model.no_sync())
                yield
        except (RuntimeError, ValueError, IndexError) as error:
            if self.batch is None or self.batch.count or isinstance(error, DdpilotError):
                raise
            raise self._empty_forward_failed(self.batch, error) from error
        finally:
            self._accumulating = outside

    def backward(
        self, loss: torch.Tensor, count: float | None, scaler: torch.amp.GradScaler | None, retain_graph: bool
    ) -> None:
        """See `Loop.backward`. Collective where the gradients are synchronised or `count` is given."""
        if loss.ndim:
            raise self._refuse(f"a loss of shape {tuple(loss.shape)}", "Pass its mean over this rank's samples.")
        num_local = self._local_count(count)
        if self._watch is not None and num_local:
            self._watch.look(loss, self.batch)
        total, correction = self._total(count)
        if self.is_update and count is None and not self._decider.is_under_way:
            self._begin()
        scaled = loss if scaler is None else scaler.scale(loss)
        parameters = (parameter for model in self.models for parameter in model.parameters())
        weight = num_local * self._group.world_size / total if total else 0.0
        with torch.autocast(loss.device.type, enabled=False):
            backward_weighted(scaled, weight, parameters, retain_graph=retain_graph)
        if correction != 1.0:
            gradients = [p.grad for model in self._accumulating for p in model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, correction)

    def settle(self) -> None:
        """Learn what all ranks decide with this update, once. Collective. Raises NonFiniteError on all ranks alike."""
        if not self._has_exchanged:
            self._begin()
        if self._decider.is_under_way:
            self._finish()

    def settle_outside(self) -> None:
        """Learn what all ranks decide between epochs. Collective."""
        self.batch = None
        self._has_exchanged = False
        self.settle()

    def drop_unfinished(self) -> bool:
        """Leave the current batch; whether there were gradients of an unfinished accumulation group to be dropped."""
        unfinished, self.batch = not self.is_update, None
        for parameter in (parameter for model in self.models for parameter in model.parameters() if unfinished):
            parameter.grad = None
        return unfinished

    def _begin(self, count: float = 0.0) -> None:
        is_bad = self.is_update and self._watch is not None and self._watch.take()
        if self._decider.is_under_way:
            self._finish()
        self._decider.begin(count=count, is_bad=is_bad)
        self._has_exchanged = True

    def _finish(self) -> Decision:
        decision = self._decider.finish()
        if decision.num_bad and self._watch is not None:
            raise_nonfinite(self._group, self._watch, self.models)
        return decision

    def _local_count(self, count: float | None) -> float:
        if count is not None:
            return float(count)
        if self.batch is None:
            raise self._refuse(
                "it is outside `batches`, so the number of samples is not known",
                "Iterate over loop.batches(loader), or pass `count=`: samples (or tokens) behind this rank's mean.",
            )
        return float(self.batch.count)

    def _total(self, count: float | None) -> tuple[float, float]:
        """What this loss is divided by, and what the accumulated gradients are multiplied by after it."""
        if count is None:
            assert self.batch is not None  # _local_count() has looked
            return float(self.batch.group_count), 1.0
        self._begin(float(count))
        global_count = self._finish().count
        if self.batch is None or self.batch.group_size == 1:
            return global_count, 1.0
        totals = self._totals_of_group(global_count, self.batch)
        totals.add(global_count)
        return totals.reference, totals.correction if self.batch.is_last else 1.0

    def _totals_of_group(self, global_count: float, batch: CurrentBatch) -> CountTotals:
        models = tuple(id(model) for model in self._accumulating)
        if not models:
            raise self._refuse(
                "`count=` with accumulation, and it is not known whose gradients are accumulated",
                "Put forward and backward into `with loop.accumulate(model):`.",
            )
        if batch.is_first and models in self._totals:
            raise self._refuse(
                "two losses with `count=` for one model in one batch of an accumulation group",
                "Add the losses and call backward() once, or do not accumulate.",
            )
        if batch.is_first:
            self._totals[models] = CountTotals(global_count, batch.group_size)
        return self._totals[models]

    def _refuse(self, found: str, fix: str) -> LoopError:
        return LoopError("running backward", found=found, fix=fix, rank=self._group.rank)

    def _empty_forward_failed(self, batch: CurrentBatch, error: Exception) -> LoopError:
        return LoopError(
            f"training on batch {batch.index} of epoch {batch.epoch}",
            found=f"it has {batch.global_count} samples for {self._group.world_size} ranks, none of them here, and the "
            f"model does not run on zero rows ({error})",
            fix="Write x.flatten(1) for x.view(len(x), -1); or use drop_last=True or another global_batch_size.",
            rank=self._group.rank,
        )
