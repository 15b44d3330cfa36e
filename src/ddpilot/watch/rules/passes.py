# SPDX-License-Identifier: Apache-2.0
"""After how many steps of an optimizer ranks began to read their data again."""

from __future__ import annotations

_MAX_PASSES = 64


class PassesBegun:
    """Of one optimizer on several ranks: the newest passes over loaders."""

    def __init__(self) -> None:
        self._num_steps: dict[int, int] = {}
        self._begun: dict[tuple[int, int], dict[int, int]] = {}

    def step(self, rank: int) -> None:
        """`rank` takes a step."""
        self._num_steps[rank] = self._num_steps.get(rank, 0) + 1

    def begin(self, rank: int, loader: int, number: int) -> None:
        """`rank` begins to read `loader` the how manieth time."""
        self._begun.setdefault((loader, number), {}).setdefault(rank, self._num_steps.get(rank, 0))
        if len(self._begun) > _MAX_PASSES:
            self._begun.pop(next(iter(self._begun)))

    def find_uneven(self, since: int) -> dict[int, int]:
        """By rank: after how many steps it began the first pass that came at another step on another rank.

        Of passes that all began before step `since` none is told; empty where there is none.
        """
        uneven = (begun for begun in self._begun.values() if len({*begun.values()}) > 1)
        return next((begun for begun in uneven if max(begun.values()) >= since), {})
