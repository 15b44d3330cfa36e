# SPDX-License-Identifier: Apache-2.0
"""Record after how many optimizer steps each rank began its passes over the data."""

from __future__ import annotations

_MAX_PASSES = 64


class PassesBegun:
    """The newest passes over loaders, for one optimizer on several ranks."""

    def __init__(self) -> None:
        self._num_steps: dict[int, int] = {}
        self._begun: dict[tuple[int, int], dict[int, int]] = {}

    def step(self, rank: int) -> None:
        """Count a step of `rank`."""
        self._num_steps[rank] = self._num_steps.get(rank, 0) + 1

    def begin(self, rank: int, loader: int, number: int) -> None:
        """Note that `rank` starts pass `number` over `loader`."""
        self._begun.setdefault((loader, number), {}).setdefault(rank, self._num_steps.get(rank, 0))
        if len(self._begun) > _MAX_PASSES:
            self._begun.pop(next(iter(self._begun)))

    def find_uneven(self, since: int) -> dict[int, int]:
        """Return by rank the number of steps before the first pass that did not begin at the same step on all ranks.

        Ignores passes that all began before step `since`; empty if there is none.
        """
        uneven = (begun for begun in self._begun.values() if len({*begun.values()}) > 1)
        return next((begun for begun in uneven if max(begun.values()) >= since), {})
