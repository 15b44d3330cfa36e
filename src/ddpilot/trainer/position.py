# SPDX-License-Identifier: Apache-2.0
"""The position of a trainer over all of its fits, and the part of its state that checkpoints hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.history import History
from ddpilot.trainer.losses import Ledger
from ddpilot.training.loop import Loop


@dataclass
class Position:
    """Where the next fit starts."""

    epoch: int = 0
    next_batch: int = 0
    """0, unless the last fit was stopped in the middle of `epoch`."""
    num_updates: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    """Description of the data to which `next_batch` applies."""


class Story:
    """The history and the callbacks' states, saved and restored together with a checkpoint."""

    def __init__(self, history: History, callbacks: Sequence[Callback]) -> None:
        self._history = history
        self._callbacks = callbacks
        self._ledger: Ledger | None = None
        self._left: dict[str, Any] | None = None

    def begin_epoch(self, loop: Loop) -> Ledger:
        """Return a ledger for an epoch that starts now, or that resumes from a checkpoint in its middle."""
        before, self._left = self._left, None
        self._ledger = Ledger(loop, before if loop.next_batch else None)
        return self._ledger

    def end_epoch(self) -> None:
        """Drop the ledger, whose losses go into the history."""
        self._ledger = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with callbacks in order, by class name. Collective in the middle of an epoch."""
        states = [(type(callback).__qualname__, callback.state_dict()) for callback in self._callbacks]
        running = None if self._ledger is None else self._ledger.state_dict()
        return {"history": self._history.state_dict(), "callbacks": states, "running": running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state. A callback without a saved state keeps its own; one without a callback is ignored."""
        self._left = state["running"]
        self._history.load_state_dict(state["history"])
        left = list(state["callbacks"])
        for callback in self._callbacks:
            name = type(callback).__qualname__
            place = next((place for place, (kind, _) in enumerate(left) if kind == name), None)
            if place is not None:
                callback.load_state_dict(left.pop(place)[1])
