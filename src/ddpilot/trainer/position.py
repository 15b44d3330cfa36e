# SPDX-License-Identifier: Apache-2.0
"""How far a trainer has come, over all of its fits; and what of it a checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.history import History


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

    def state_dict(self) -> dict[str, Any]:
        """Of the callbacks by the names of their classes, in their order."""
        states = [(type(callback).__qualname__, callback.state_dict()) for callback in self._callbacks]
        return {"history": self._history.state_dict(), "callbacks": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A callback that is new keeps the state that it has; one that is gone is left out."""
        self._history.load_state_dict(state["history"])
        left = list(state["callbacks"])
        for callback in self._callbacks:
            name = type(callback).__qualname__
            place = next((place for place, (kind, _) in enumerate(left) if kind == name), None)
            if place is not None:
                callback.load_state_dict(left.pop(place)[1])
