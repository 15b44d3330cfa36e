# SPDX-License-Identifier: Apache-2.0
"""`OptimizerSteps`: clip gradients, check them, step an optimizer, with a closure or not, and count the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ddpilot.errors import LoopError
from ddpilot.group.device import is_out_of_memory
from ddpilot.training.coordination.out_of_memory import explain_out_of_memory
from ddpilot.training.engine.parts import LoopParts
from ddpilot.training.models.optimizers import (
    check_closure,
    clear_gradients,
    is_about_closure,
    needs_closure,
    step_scheduler,
)
from ddpilot.training.models.registry import OptimizerRecord, parameters_of
from ddpilot.training.models.sharding import clip, clip_values, total_norm
from ddpilot.training.options import check_clipping
from ddpilot.training.step.update import UpdateState

Closure = Callable[[], object]
Parameters = Iterable[torch.Tensor] | torch.Tensor


class OptimizerSteps:
    """Implements `Loop.step` and the clipping before it."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._updates = parts.updates
        self._prepared = parts.prepared
        self._precision = parts.precision
        self._local = parts.local

    def clip_norm(self, parameters: Parameters, max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Implement `Loop.clip_grad_norm_`."""
        check_clipping("clipping gradients", max_norm=max_norm, norm_type=norm_type)
        given = self._begin_clipping(parameters)
        if given is None:
            return None
        norm = total_norm([p.grad for p in given if p.grad is not None], norm_type)
        self._updates.check_norm(given, norm)  # clipping by a NaN norm would make all gradients NaN
        self._precision.note_norm(given, self._prepared.optimizers, norm)
        clip(given, max_norm, norm)
        return norm

    def clip_value(self, parameters: Parameters, clip_value: float) -> None:
        """Implement `Loop.clip_grad_value_`."""
        check_clipping("clipping gradients", clip_value=clip_value)
        given = self._begin_clipping(parameters)
        if given is not None:
            self._updates.check_norm(given)
            clip_values(given, clip_value)

    def _begin_clipping(self, parameters: Parameters) -> list[torch.Tensor] | None:
        """Complete and unscale the gradients of `parameters` and return these; None within an accumulation group."""
        if not self._updates.is_update:
            return None
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._updates.complete()
        self._precision.unscale(given, self._prepared.optimizers)
        return given

    def step(self, optimizer: Optimizer, scheduler: Any, closure: Closure | None, ahead: bool) -> bool:
        """Implement `Loop.step`. Collective."""
        if not self._updates.is_update:
            return False
        if closure is not None or not hasattr(optimizer, "param_groups"):
            self._check(optimizer, closure)
        own = self._prepared.record_of(optimizer)
        self._parts.unprepared.check_optimizer(optimizer, own)
        self._updates.check_step(optimizer, own, has_closure=closure is not None)
        try:
            done = self._update(optimizer, own, closure, ahead)
        except (RuntimeError, MemoryError) as error:  # an optimizer allocates its state in its first step
            if not is_out_of_memory(error):
                raise
            raise explain_out_of_memory(error, self._parts.group, self._parts.sharing, self._updates.batch) from error
        clear_gradients(optimizer)
        if self._prepared.has_sharded:
            for prepared in self._prepared.models:
                prepared.settle()
        self._updates.after_step(optimizer, own)
        if self._updates.batch is None:
            self._precision.settle(self._prepared.optimizers)
        if done and scheduler is not None:
            step_scheduler(scheduler, self._updates.objective)
        if done:
            self._local.note_step()
        if done and self._updates.begins_update(optimizer):
            self._parts.position.num_updates += 1
        if self._updates.batch is None:
            self._local.after_update(ends=False)
        return done

    def _check(self, optimizer: Optimizer, closure: Closure | None) -> None:
        did = "updating the weights"
        if not hasattr(optimizer, "param_groups"):
            found = f"a {type(optimizer).__name__} in place of an optimizer"
            raise LoopError(did, found=found, fix="Write loop.step(optimizer).")
        if closure is not None and self._local.is_on:
            found = "a closure with `sync_every`, so each rank would step by its own loss"
            raise LoopError(did, found=found, fix="Prepare the model without `sync_every`.")

    def _update(self, optimizer: Optimizer, own: OptimizerRecord, closure: Closure | None, ahead: bool) -> bool:
        if closure is not None:
            largest, is_scaled = self._parts.accumulation.largest, self._precision.scaler is not None
            check_closure(optimizer, largest, is_scaled, ahead=ahead)
            return self._precision.step(optimizer, Evaluations(self._updates, closure, optimizer, ahead=ahead))
        self._updates.protect(own.parameters)
        try:
            return self._precision.step(optimizer)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            if is_out_of_memory(error) or not is_about_closure(error):
                raise
            raise needs_closure(optimizer) from error


class Evaluations:
    """The closure of `Loop.step` as the optimizer gets it: each call returns the loss over all ranks. Collective.

    `ahead`: evaluate `closure` once now, for optimizers that read the gradients before they call their closure. The
    first call returns that evaluation, unless the optimizer has changed the weights or cleared the gradients before.
    """

    def __init__(
        self, updates: UpdateState, closure: Callable[[], object], optimizer: Optimizer, *, ahead: bool
    ) -> None:
        self._updates = updates
        self._closure = closure
        self._optimizer = optimizer
        self._known: torch.Tensor | None = None
        self._before: list[tuple[torch.Tensor, int, int]] = []
        if ahead:
            self._known = updates.evaluate(closure, optimizer)
            # Copies, not version counters, which `parameter.data.add_()` does not change.
            self._before = [(one.detach().clone(), *_identity(one.grad)) for one in parameters_of(optimizer)]

    def __call__(self) -> torch.Tensor:
        """Return the loss over all ranks, shape (), and leave its gradients in the parameters."""
        known, self._known = self._known, None
        if known is not None and self._is_unchanged():
            return known
        return self._updates.evaluate(self._closure, self._optimizer)

    def _is_unchanged(self) -> bool:
        # The weights and gradients are equal on all ranks, and so is the result.
        return all(
            (number, version) == _identity(one.grad) and torch.equal(one, weights)
            for one, (weights, number, version) in zip(parameters_of(self._optimizer), self._before, strict=True)
        )


def _identity(gradient: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (id(gradient), gradient._version)
