# SPDX-License-Identifier: Apache-2.0
"""`Evaluations`: what an optimizer calls to compute the loss and the gradients again, within one step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from ddpilot.training.models.registry import parameters_of
from ddpilot.training.step.update import UpdateState


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
