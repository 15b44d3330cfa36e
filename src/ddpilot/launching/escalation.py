# SPDX-License-Identifier: Apache-2.0
"""`Escalation`: the steps that end ranks, each at its time; `launch` and sessions define their own steps."""

from __future__ import annotations

import bisect
from collections.abc import Callable

Step = Callable[[float], None]
"""Acts on the ranks; called with the current time."""


class Escalation:
    """Steps in the order of their times, which are in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, Step]] = []

    @property
    def due_s(self) -> float | None:
        """Time of the next step; None if no step is left."""
        return self._steps[0][0] if self._steps else None

    @property
    def next_step(self) -> Step | None:
        """The next step; None if no step is left."""
        return self._steps[0][1] if self._steps else None

    def start(self, *steps: tuple[float, Step]) -> None:
        """Replace all steps."""
        self._steps = sorted(steps, key=_time_of)

    def add(self, due_s: float, step: Step) -> None:
        """Add a step, after those that are due at the same time."""
        bisect.insort(self._steps, (due_s, step), key=_time_of)

    def discard(self, *steps: Step) -> None:
        """Remove every occurrence of `steps`."""
        self._steps = [each for each in self._steps if each[1] not in steps]

    def clear(self) -> None:
        """Remove all steps."""
        self._steps.clear()

    def advance(self, by_s: float) -> None:
        """Move all steps forward by `by_s` seconds."""
        self._steps = [(due_s - by_s, step) for due_s, step in self._steps]

    def run_due(self, now_s: float) -> None:
        """Take the steps that are due, including those that they add."""
        while self._steps and self._steps[0][0] <= now_s:
            self._steps.pop(0)[1](now_s)


def _time_of(step: tuple[float, Step]) -> float:
    return step[0]
