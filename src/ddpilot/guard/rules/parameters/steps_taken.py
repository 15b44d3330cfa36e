# SPDX-License-Identifier: Apache-2.0
"""Record which optimizer steps each rank took, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass

from ddpilot.guard.rules.parameters.steps import When
from ddpilot.record.journal import Entry

MAX_STEPS = 128
"""Number of each rank's newest steps that are kept."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step that some ranks took and others did not."""

    number: int
    """The number of the step."""
    taken_by: tuple[int, ...]
    ranks: tuple[int, ...]
    """The ranks that did not take it."""


class StepsTaken:
    """The newest steps of every rank with one unit, each identified by its `When`."""

    def __init__(self) -> None:
        self.first_ns: dict[int, int] = {}
        """When each rank took its first step."""
        self.newest = 0
        """The highest step number."""
        self._last: dict[int, When] = {}
        self._order: dict[int, deque[tuple[When, int]]] = {}

    @property
    def ranks(self) -> Set[int]:
        """The ranks that took a step."""
        return self._order.keys()

    def add(self, rank: int, entry: Entry) -> When:
        """Add a step that `rank` is about to take, and return its `When`."""
        number = entry.values["s"]
        last = self._last.get(rank, (-1, 0))
        when = (number, last[1] + 1 if last[0] == number else 0)
        self._last[rank] = when
        count = int(entry.values["n"])
        self._order.setdefault(rank, deque(maxlen=MAX_STEPS)).append((when, count))
        self.first_ns.setdefault(rank, entry.time_ns)
        self.newest = max(self.newest, count)
        return when

    def newest_of(self, rank: int) -> When:
        """Return the `When` of the newest step of `rank`."""
        return self._last.get(rank, (-1, 0))

    def find_skipped(self) -> Skipped | None:
        """Return the first step that a rank skipped, in the range that all ranks cover; None if there is none."""
        begun = max((order[0] for order in self._order.values()), default=((0, 0), 0))[0]
        ended = min((order[-1] for order in self._order.values()), default=((0, 0), 0))[0]
        taken = {rank: dict(order) for rank, order in self._order.items()}
        for when in sorted(set().union(*taken.values())):
            ranks = tuple(rank for rank in taken if when not in taken[rank])
            if ranks and begun <= when <= ended:
                counts = {rank: steps[when] for rank, steps in taken.items() if when in steps}
                return Skipped(min(counts.values()), tuple(counts), ranks)
        return None

    def clear(self) -> None:
        """Forget the order, once it is no longer needed."""
        self._order.clear()
