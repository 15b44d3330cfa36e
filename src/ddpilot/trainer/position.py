# SPDX-License-Identifier: Apache-2.0
"""How far a trainer has come, over all of its fits; and what of it a checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.history import History
from ddpilot.trainer.ledger import Ledger
from ddpilot.training.loop import Loop


@dataclass
class Position:
    """Where the next fit begins."""

    epoch: int = 0
    next_batch: int = 0
    """0, unless the last fit was stopped in the middle of `epoch`."""
    num_updates: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    """What the data were in which `next_batch` means something."""


class Story:
    """The history and the callbacks' states, as one thing that is saved and restored with a checkpoint."""

    def __init__(self, history: History, callbacks: Sequence[Callback]) -> None:
        self._history = history
        self._callbacks = callbacks
        self._ledger: Ledger | None = None
        self._left: dict[str, Any] | None = None

    def begin_epoch(self, loop: Loop) -> Ledger:
        """The losses of an epoch that begins now, or goes on where a checkpoint in its middle left it."""
        before, self._left = self._left, None
        self._ledger = Ledger(loop, before if loop.next_batch else None)
        return self._ledger

    def end_epoch(self) -> None:
        """Its losses are in the history, or are to be."""
        self._ledger = None

    def state_dict(self) -> dict[str, Any]:
        """Of the callbacks by the names of their classes, in their order. In the middle of an epoch collective."""
        states = [(type(callback).__qualname__, callback.state_dict()) for callback in self._callbacks]
        running = None if self._ledger is None else self._ledger.state_dict()
        return {"history": self._history.state_dict(), "callbacks": states, "running": running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A callback that is new keeps the state that it has; one that is gone is left out."""
        self._left = state["running"]
        self._history.load_state_dict(state["history"])
        left = list(state["callbacks"])
        for callback in self._callbacks:
            name = type(callback).__qualname__
            place = next((place for place, (kind, _) in enumerate(left) if kind == name), None)
            if place is not None:
                callback.load_state_dict(left.pop(place)[1])
