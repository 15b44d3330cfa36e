# SPDX-License-Identifier: Apache-2.0
"""Hooks that run right before optimizer.step(), when gradients are final and weights and learning rates unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddpilot.trainer.run import Run


class BeforeSteps:
    """Calls `look(name, optimizer)` before each step of each optimizer of a run, until `remove`."""

    def __init__(self, run: Run, look: Callable[[str, Optimizer], None]) -> None:
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(_hook(name, look)) for name, optimizer in run.optimizers.items()
        ]

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _hook(name: str, look: Callable[[str, Optimizer], None]) -> Callable[..., None]:
    def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        look(name, optimizer)

    return hook


def label(name: str, run: Run, what: str) -> str:
    """Return `what` with one optimizer, "what.name" with several."""
    return what if len(run.optimizers) == 1 else f"{what}.{name}"
