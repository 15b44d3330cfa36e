# SPDX-License-Identifier: Apache-2.0
"""Hooks that run right before optimizer.step(), when gradients are final and weights and learning rates unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddpilot.trainer.run import Run


class BeforeSteps:
    """Calls `look(name, optimizer, update)` before each step of each optimizer of a run, until `remove`.

    `update`: number of the update that the step belongs to, as `Run.update` gives it afterwards.
    """

    def __init__(self, run: Run, look: Callable[[str, Optimizer, int], None]) -> None:
        self._run = run
        self._look = look
        self._batch: tuple[int, int] | None = None
        self._stepped: set[str] = set()  # in this update
        self._update = 0
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._hook(name)) for name, optimizer in run.optimizers.items()
        ]

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            now = self._run.loop.batch
            batch = None if now is None else (now.epoch, now.index)
            if batch != self._batch or name in self._stepped:
                self._batch, self._update = batch, self._run.update + 1
                self._stepped.clear()
            self._stepped.add(name)
            self._look(name, optimizer, self._update)

        return hook


def label(name: str, run: Run, what: str) -> str:
    """Return `what` with one optimizer, "what.name" with several."""
    return what if len(run.optimizers) == 1 else f"{what}.{name}"
